"""Parameters of which each rank holds a part: as DTensors, which FSDP2 or tensor parallel made of them.

part_of, divided         a rank's part of a whole tensor; no communication
whole_parameters         for a while, parameters are whole plain tensors
take_whole_values        `load_state_dict` of a model takes whole tensors; `take_whole_states` does so for an optimizer
units, groups            what FSDP2 has put on a model
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.modules import parameter_table
from paceline.world.param_groups import parameters_by_number
from paceline.world.sharded import is_sharded, local, part_like, whole

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from paceline.torch_internals.fsdp import FSDPParam, FSDPParamGroup

Value = TypeVar("Value")


# -- this rank's part ----------------------------------------------------------------------------------------------------


def part_of(tensor: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor, divided as the DTensor `like` is; needs no communication."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements).to_local()


def divided(value: Value, like: object) -> Value | Tensor:
    """A whole tensor as a DTensor that is divided as `like` is; any other value or shape, and what is divided, as it is."""
    if not isinstance(value, Tensor) or not is_sharded(like):
        return value
    if is_sharded(value) or value.shape != like.shape or not value.dim():
        return value
    own = part_of(value.to(like.device), like).clone()
    return part_like(own, like)


# -- whole parameters ----------------------------------------------------------------------------------------------------


@contextmanager
def whole_parameters(model: nn.Module, writeback: bool = False) -> Iterator[None]:
    """While it is open, each divided parameter of `model` is a whole plain one. Ranks: all that hold parts.

    Args:
        model: any module; what is not divided stays as it is.
        writeback: each rank takes its part of what was changed inside, also where an exception ends the block: on one
            process, what was changed before the exception stays changed too.
    """
    places: list[tuple[dict[str, Tensor | None], str, DTensor]] = []
    for module in model.modules():
        slots = parameter_table(module)
        for name, parameter in slots.items():
            if is_sharded(parameter):
                places.append((slots, name, parameter))
    # A parameter that several modules share is gathered once, and stays shared.
    gathered: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for slots, name, parameter in places:
            if id(parameter) not in gathered:
                gathered[id(parameter)] = nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
            slots[name] = gathered[id(parameter)]
    try:
        with undisturbed(model if places else nn.Module()):
            yield
    finally:
        for slots, name, parameter in places:
            changed = slots[name]
            slots[name] = parameter
            if writeback and changed is not None:
                local(parameter.detach()).copy_(part_of(changed.detach(), parameter))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """While it is open, FSDP2 does not look for its shards after a `load_state_dict` into what took their place."""
    with internals.without_taking_up(group_parameters(model)):
        yield


def take_whole_values(model: nn.Module) -> None:
    """Lets `load_state_dict` of the model and its modules take whole tensors for divided parameters."""

    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in parameter_table(module).items():
            if prefix + name in state:
                state[prefix + name] = divided(state[prefix + name], parameter)

    for module in model.modules():
        if any(is_sharded(parameter) for parameter in parameter_table(module).values()):
            module.register_load_state_dict_pre_hook(convert)


def take_whole_states(optimizer: Optimizer) -> None:
    """Lets `load_state_dict` of the optimizer take whole states for divided parameters."""

    def convert(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        parameters = parameters_by_number(optimizer, saved)
        states = {}
        for number, state in saved["state"].items():
            like = parameters.get(number)
            states[number] = {key: divided(value, like) for key, value in state.items()}
        return {**saved, "state": states}

    optimizer.register_load_state_dict_pre_hook(convert)


# -- what FSDP2 has put on a model ---------------------------------------------------------------------------------------


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules on which `fully_shard` or `replicate` was called."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def groups(model: nn.Module) -> list[FSDPParamGroup]:
    """What is gathered and reduced together, in the order of modules."""
    in_order: dict[FSDPParamGroup, None] = {}
    for unit in units(model):
        in_order |= dict.fromkeys(internals.parameter_groups(unit))
    return list(in_order)


def group_parameters(model: nn.Module) -> Iterator[FSDPParam]:
    """The group parameters of all groups."""
    for group in groups(model):
        yield from internals.group_parameters(group)


def refresh(model: nn.Module) -> None:
    """Lets every unit take up parameters that were put in the place of its own."""
    for parameter in group_parameters(model):
        internals.take_up_sharded_parameter(parameter)
