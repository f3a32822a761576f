"""Tensors that are divided over ranks (DTensor), without importing DTensor where nothing is: that costs over a second."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from paceline.torch_internals.dtensor import local_tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor, Placement
    from torch.optim import Optimizer


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, of whatever placement."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Any) -> Any:
    """The whole of a tensor, gathered where it is divided. Ranks: all that hold a part; all get it."""
    if not is_sharded(tensor):
        return tensor
    with quietly():
        return tensor.full_tensor()


@contextmanager
def quietly() -> Iterator[None]:
    """While it is open, DTensor gathers over several axes without advising on each rank how meshes should be made."""
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    log.addFilter(_not_slow)
    try:
        yield
    finally:
        log.removeFilter(_not_slow)


def _not_slow(record: logging.LogRecord) -> bool:
    return "suboptimal" not in record.getMessage()


def local(tensor: Any) -> Any:
    """This rank's part of a tensor, which shares its memory: the tensor itself where it is not divided."""
    return local_tensor(tensor) if is_sharded(tensor) else tensor


def part_like(part: Tensor, like: Tensor | None, placements: Sequence[Placement] | None = None) -> Tensor:
    """This rank's own tensor as a DTensor of the mesh and shape of `like`, where that is one.

    Args:
        placements: how it is divided; None: as `like` is.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, placements or like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gradient_holder(parameter: Tensor) -> Tensor:
    """A tensor whose gradient is this rank's part of the parameter's, for functions that look at `.grad` alone."""
    if not is_sharded(parameter.grad):
        return parameter
    part: Tensor = local(parameter.grad)
    holder = part.detach()
    holder.grad = part
    return holder


class Division(Protocol):
    """How ranks share the optimizer states of parameters that each of them holds whole."""

    def covers(self, parameter: Tensor) -> bool:
        """Whether it is about this parameter at all."""
        ...

    def keeps(self, parameter: Tensor) -> bool:
        """Whether this rank keeps states of it, or a part of them."""
        ...

    def empty(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """What a saved state of the parameter's shape is read into: divided as this rank keeps it."""
        ...


_DIVISIONS = "_paceline_divisions"  # an attribute of the optimizer, which so owns what is known of its states


def divide(optimizer: Optimizer, division: Division) -> None:
    """Records at the optimizer that some of its states are divided, for those who save and load them."""
    vars(optimizer).setdefault(_DIVISIONS, []).append(division)


def division_of(optimizer: Optimizer, parameter: Tensor) -> Division | None:
    """How the optimizer's states of this parameter are divided; None where each rank keeps all that it steps."""
    divisions: list[Division] = vars(optimizer).get(_DIVISIONS, [])
    for division in divisions:
        if division.covers(parameter):
            return division
    return None
