"""`Differentiable`: a function of tensors with a backward pass of its own, mostly one that communicates."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import Function


class Differentiable(Function):
    """`torch.autograd.Function` whose call says what it gives: one tensor."""

    @classmethod
    def call(cls, tensor: Tensor, *others: object) -> Tensor:
        """`apply`, which has no types."""
        output: Tensor = cls.apply(tensor, *others)  # type: ignore[no-untyped-call]
        return output
