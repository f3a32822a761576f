"""The private side of DTensor: its own tensor, and how a placement cuts one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor, Placement


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part, which shares its memory.

    The public `to_local` records a step of autograd where gradients are enabled.
    """
    return tensor._local_tensor


def cut(tensor: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """The parts into which `Shard` or its strided form cuts a tensor for `size` ranks, as views where that is possible.

    Shape: tensor as it is cut along `placement.dim`; the parts of the last ranks may be smaller there, or empty.
    """
    parts: list[Tensor] = placement._split_tensor(tensor, size, with_padding=False, contiguous=False)[0]
    return parts
