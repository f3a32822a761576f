"""`SameInputs`: ranks that compute the same samples together (`tp`, `cp`) must be given the same inputs.

Prepared loaders see to that. A loop that draws its batches itself may seed them by the rank: then each rank would compute a
part of another batch, and the numbers would be wrong without a word. So the ranks compare the inputs of their first passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.base.errors import TrainError
from paceline.world.collectives import Collectives
from paceline.world.tree import tensors

_PASSES = 3  # of training, and as many of evaluation
# Inputs may come from kernels that add in no fixed order. Sums of other samples differ by more, even of millions of numbers.
_SAME = 1e-5

Summary = list[tuple[str, float, float]]


class SameInputs:
    """Compares the inputs of a model between ranks, in its first passes.

    Args:
        model: the model.
        axis: the axis along which the ranks compute the same samples.
        collectives: of these ranks.
    """

    def __init__(self, model: nn.Module, axis: str, collectives: Collectives) -> None:
        self._axis = axis
        self._collectives = collectives
        self._left = {True: _PASSES, False: _PASSES}
        self._hook = model.register_forward_pre_hook(self._compare, with_kwargs=True, prepend=True)

    def __reduce__(self) -> Any:
        # A copy of the model, or one that was read from a file, may be called by one rank alone.
        return _without_comparison, ()

    def _compare(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """A forward pre-hook.

        Raises:
            TrainError: `inputs-differ`, on every rank.
        """
        trains = model.training and torch.is_grad_enabled()
        if not self._left[trains] or torch.compiler.is_compiling():
            return
        self._left[trains] -= 1
        if not any(self._left.values()):
            self._hook.remove()
        summaries: list[Summary] = self._collectives.gather_object(_summary((args, kwargs)))
        first = summaries[0]
        for number, summary in enumerate(summaries):
            if _are_alike(first, summary):
                continue
            ranks = dist.get_process_group_ranks(self._collectives.group)
            raise TrainError(
                "inputs-differ",
                f"ranks that compute the same samples together along {self._axis} have got different inputs.",
                why=[
                    f"rank {ranks[0]} calls {type(model).__name__} with {_text(first)}",
                    f"rank {ranks[number]} calls it with {_text(summary)}",
                ],
                fix="draw batches by the share of the data, and not by the rank: prepare the loader; or seed by "
                "`set_seed(0, device_specific=True)` after `prepare`, which gives these ranks the same numbers",
            )


def _without_comparison() -> SameInputs:
    compares_nothing = SameInputs.__new__(SameInputs)
    compares_nothing._left = dict.fromkeys((True, False), 0)
    return compares_nothing


def _summary(inputs: object) -> Summary:
    """Returns for each tensor its kind, its sum, and a sum that depends on the order of its elements."""
    summary: Summary = []
    for tensor in tensors(inputs):
        kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if tensor.layout != torch.strided or tensor.is_meta:
            summary.append((kind, 0.0, 0.0))
            continue
        flat = tensor.detach().to("cpu", _exact(tensor)).abs().reshape(-1).double()
        weights = torch.linspace(1, 2, max(flat.numel(), 1), dtype=torch.float64)[: flat.numel()]
        summary.append((kind, float(flat.sum()), float(flat @ weights)))
    return summary


def _exact(tensor: Tensor) -> Any:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _are_alike(first: Summary, other: Summary) -> bool:
    if [kind for kind, *_ in first] != [kind for kind, *_ in other]:
        return False
    pairs = zip(first, other, strict=True)
    return all(_is_near(a[1], b[1]) and _is_near(a[2], b[2]) for a, b in pairs)


def _is_near(value: float, other: float) -> bool:
    # Two NaN, or two infinities, say nothing.
    distance = abs(value - other)
    return not distance > _SAME * max(abs(value), abs(other))


def _text(summary: Summary) -> str:
    return ", ".join(f"{kind} (sum of absolute values {total:.6g})" for kind, total, _ in summary) or "no tensors"
