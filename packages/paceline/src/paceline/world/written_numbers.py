"""Numbers by which scripts change divided tensors: each rank changes its part by its own, and all must have the same.

    p.grad.mul_(number)            it is noted where it is written
    p.grad = p.grad * number       the result carries it; it is noted as that is written, gathered, or stepped as a gradient

Nothing is sent for this: `Replicas` compares the sum of what was noted.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from paceline.torch_internals.dispatch import Operation, is_in_autograd_node, written_arguments
from paceline.world.sharded import is_sharded
from paceline.world.tree import leaves, tensors

_CARRIED = "_paceline_numbers"  # attribute of a divided tensor: a sum of the numbers that it was computed with
_GOLDEN = 0.6180339887498949  # whose multiples are spread evenly between whole numbers
# torch has one table of what runs in the place of an operator; the runs of a process have a sum each.
_sums: weakref.WeakSet[WrittenNumbers] = weakref.WeakSet()


class WrittenNumbers:
    """The `total` of numbers, and of norms of whole tensors, each with another weight: two do not cancel out."""

    def __init__(self) -> None:
        self.forget()
        _sums.add(self)

    def forget(self) -> None:
        """Begins a new sum."""
        self.total: float | Tensor = 0.0
        self._count = 0

    def note(self, value: float | Tensor) -> None:
        """Adds a number, the norm of a whole tensor, or the number that a divided tensor carries."""
        number = _number_of(value)
        if number is not None:
            self._count += 1
            self.total = self.total + number * (1 + self._count * _GOLDEN % 1)


def note_written(value: float | Tensor) -> None:
    """Notes what is written into divided tensors, for all runs of this process."""
    for written in list(_sums):
        written.note(value)


def note_numbers(operation: Operation, args: tuple[Any, ...], keywords: dict[str, Any], result: object) -> None:
    """Notes the numbers of an operation that has run on parts, or lets its result carry them."""
    written = tensors(written_arguments(operation, args, keywords))
    values = leaves((args, keywords))
    # What autograd computes is averaged later, and comes of losses that each rank has for itself.
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors(values))
    if not written and (is_recorded or is_in_autograd_node()):
        return
    numbers = [number for number in map(_number_of, filter(_is_number, values)) if number is not None]
    if any(tensor.dim() for tensor in written):
        for number in numbers:
            note_written(number)
    elif numbers and not written:
        # So that an average which is computed of itself, step by step, does not grow.
        carried = sum(number / (place + 2) for place, number in enumerate(numbers))
        for tensor in filter(is_sharded, tensors(result)):
            setattr(tensor, _CARRIED, carried)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) or (isinstance(value, Tensor) and (is_sharded(value) or not value.dim()))


def _number_of(value: float | Tensor) -> float | Tensor | None:
    """Returns a finite number, beside which others can be told apart; None where there is none to be compared."""
    if not isinstance(value, Tensor):
        return value if math.isfinite(value) else 2.0 if math.isnan(value) else math.copysign(3.0, value)
    if is_sharded(value):
        carried: float | Tensor | None = getattr(value, _CARRIED, None)
        return carried
    if value.is_meta or value.is_sparse or type(value) not in (Tensor, torch.nn.Parameter):
        return None
    with torch.no_grad():
        number = torch.linalg.vector_norm(value) if value.dim() else value.detach()
        return number.double().nan_to_num(nan=2.0, posinf=3.0, neginf=-3.0)
