"""Functions for tensors that may be divided over ranks (DTensor). Only then do they import it, which takes over a second."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from paceline.torch_internals.dtensor import REDISTRIBUTION_LOG, local_tensor

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor, Placement
    from torch.optim import Optimizer


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Returns whether a tensor is a DTensor, of whatever placement."""
    # If the module was never imported, no tensor can be a DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Iterable[object]) -> bool:
    """Returns whether one of the tensors is a DTensor. A step asks this of all its gradients."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def whole(tensor: Any) -> Any:
    """Returns the whole tensor, gathered if it is divided. Ranks: all that have a part; all get the whole."""
    if not is_sharded(tensor):
        return tensor
    with quietly():
        from paceline.world.gathered_bytes import gathered

        return gathered(tensor)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppresses a warning: where DTensor gathers over several axes, it advises on each rank to make meshes differently."""
    log = logging.getLogger(REDISTRIBUTION_LOG)
    log.addFilter(_not_slow)
    try:
        yield
    finally:
        log.removeFilter(_not_slow)


def _not_slow(record: logging.LogRecord) -> bool:
    return "suboptimal" not in record.getMessage()


def local(tensor: Any) -> Any:
    """Returns this rank's part of a tensor, which shares its memory; the tensor itself if it is not divided."""
    return local_tensor(tensor) if is_sharded(tensor) else tensor


def part_like(part: Tensor, like: Tensor | None, placements: Sequence[Placement] | None = None) -> Tensor:
    """Returns this rank's own tensor as a DTensor with the mesh and shape of `like`; unchanged if `like` is no DTensor.

    Args:
        part: this rank's own tensor.
        like: a tensor of the whole shape.
        placements: how the tensor is divided; None for the placements of `like`.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, placements or like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gradient_holder(parameter: Tensor) -> Tensor:
    """Returns a tensor whose `.grad` is this rank's part of the parameter's gradient, for functions that only read `.grad`."""
    if not is_sharded(parameter.grad):
        return parameter
    part: Tensor = local(parameter.grad)
    holder = part.detach()
    holder.grad = part
    return holder


class Division(Protocol):
    """How ranks share the optimizer states of parameters that each of them holds whole."""

    def covers(self, parameter: Tensor) -> bool:
        """Returns whether the states of this parameter are divided in this way."""
        ...

    def keeps(self, parameter: Tensor) -> bool:
        """Returns whether this rank keeps states of the parameter, or a part of them."""
        ...

    def empty(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns an empty state of the parameter's shape, divided as this rank keeps it, to read a saved state into."""
        ...

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Returns a context in which the optimizer holds what this rank steps. Ranks: all that share the states."""
        ...


# An attribute of the optimizer: the entries live as long as the optimizer does, without a global table.
_DIVISIONS = "_paceline_divisions"


def divide(optimizer: Optimizer, division: Division) -> None:
    """Records on the optimizer that some of its states are divided, for the code that saves and loads them."""
    vars(optimizer).setdefault(_DIVISIONS, []).append(division)


def division_of(optimizer: Optimizer, parameter: Tensor) -> Division | None:
    """Returns how the optimizer's states of this parameter are divided; None if each rank keeps all states that it uses."""
    divisions: list[Division] = vars(optimizer).get(_DIVISIONS, [])
    for division in divisions:
        if division.covers(parameter):
            return division
    return None


def is_made_of_tensors(value: object) -> TypeGuard[Tensor]:
    """Returns whether a value is a tensor whose values are in other tensors, such as 8-bit codes and their scales.

    DTensors are none of these: each rank holds a part of one tensor.
    """
    return hasattr(value, "__tensor_flatten__") and hasattr(value, "untyped_storage") and not is_sharded(value)


def plain_tensors(tensor: Tensor, name: str = "") -> dict[str, Tensor]:
    """Returns the plain tensors inside a tensor, by their names behind `name`: itself, or those that a wrapper (a DTensor, one
    of torchao's) holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return {name: tensor}
    names, _ = tensor.__tensor_flatten__()
    inner: dict[str, Tensor] = {}
    for attribute in names:
        part = getattr(tensor, attribute)
        if hasattr(part, "untyped_storage"):  # a DTensor names its mesh, too
            inner |= plain_tensors(part, f"{name}.{attribute}")
    return inner
