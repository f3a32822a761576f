"""`receipt`: what weights are, in a few bytes, so that whoever gets them can check that they arrived.

    receipt = verify.receipt(trainer_model)        before the hand-over
    receipt.check(generation_model)                after it: raises, and names the first tensor that did not arrive

A tensor's sums are computed on its device over its bits as whole numbers, once plain and once weighted by position, and only
these two numbers leave it. Whole numbers wrap around, so that every device and every order of additions gives the same sums.
They tell a changed bit, and tensors whose values stand in another order; they are no protection against someone who wants to
deceive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.errors import TrainError
from paceline.checkpoint.state.module_state import ModuleState, clean
from paceline.world.sharded import whole

_CHUNK = 1 << 24  # elements at once, so that the sums need little memory
_STEP = 2654435761  # odd, so that no two positions have the same weight


@dataclass(frozen=True)
class TensorReceipt:
    """One tensor: its shape and dtype, the sum of its bits, and the same weighted by position."""

    shape: tuple[int, ...]
    dtype: str
    total: int
    ordered: int


@dataclass(frozen=True)
class Receipt:
    """What weights are. It can be sent to another process: by pickle, or as a dict by `to_dict` and `of_dict`."""

    tensors: Mapping[str, TensorReceipt]

    def differences(self, other: nn.Module | Mapping[str, Any] | Receipt) -> Iterator[str]:
        """Yields a sentence for each tensor that did not arrive, in the order of the sender.

        Ranks: all that hold a part of a divided tensor must take every sentence, or none.
        """
        arrived = other if isinstance(other, Receipt) else receipt(other)
        for name, sent in self.tensors.items():
            difference = _difference(sent, arrived.tensors.get(name))
            if difference:
                yield f"{name}: {difference}"
        for name in arrived.tensors:
            if name not in self.tensors:
                yield f"{name}: it was not sent"

    def check(self, other: nn.Module | Mapping[str, Any] | Receipt) -> None:
        """Raises if something did not arrive as it was sent.

        Args:
            other: what arrived: a module, a state dict, or a receipt of it.

        Raises:
            TrainError: `weights-differ`, with the first tensor that differs and how many do.

        Ranks: all that hold a part of a divided tensor.
        """
        found = list(self.differences(other))
        if found:
            raise TrainError(
                "weights-differ",
                f"{len(found)} of {len(self.tensors)} tensors are not what was handed over; the first is {found[0]}.",
                why="the receipt was made of what was sent, and compared with what arrived",
                fix="copy the weights again after the last optimizer step, under the same names, shapes and dtype",
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold."""
        return {name: asdict(tensor) for name, tensor in self.tensors.items()}

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Receipt:
        """Reads what `to_dict` returned."""
        return cls(
            {name: TensorReceipt(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in content.items()}
        )


def receipt(weights: nn.Module | Mapping[str, Any]) -> Receipt:
    """Makes a receipt of a module or a state dict: its parameters and buffers; what is no tensor is left out.

    Names are those without what DDP and `torch.compile` add. Ranks: all that hold a part of a divided tensor.
    """
    if isinstance(weights, nn.Module):
        state: Mapping[str, Any] = ModuleState.of(weights).tensors
    else:
        state = {clean(name): value for name, value in weights.items()}
    return Receipt({name: _receipt_of(value) for name, value in state.items() if isinstance(value, Tensor)})


def _receipt_of(tensor: Tensor) -> TensorReceipt:
    full: Tensor = whole(tensor.detach())
    flat = full.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(kinds[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    ordered = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        values = chunk.long()
        begin = number * _CHUNK + 1
        weights = torch.arange(begin, begin + len(chunk), device=bits.device) * _STEP
        total += values.sum()
        # The product wraps around in the same way everywhere.
        ordered += (values * weights).sum()
    dtype = str(full.dtype).removeprefix("torch.")
    return TensorReceipt(tuple(full.shape), dtype, int(total), int(ordered))


def _difference(sent: TensorReceipt, arrived: TensorReceipt | None) -> str:
    """Returns what is different; "" if nothing is."""
    if arrived is None:
        return "it is missing"
    if sent.dtype != arrived.dtype:
        return f"{sent.dtype} was sent, and {arrived.dtype} arrived"
    same_values = sent.total == arrived.total
    if sent.shape != arrived.shape:
        transposed = sent.shape == arrived.shape[::-1] and same_values
        return f"the shape {sent.shape} was sent, and {arrived.shape} arrived" + (", transposed" if transposed else "")
    if sent.ordered != arrived.ordered:
        return "the same values arrived in another order" if same_values else "other values arrived"
    return "" if same_values else "other values arrived"
