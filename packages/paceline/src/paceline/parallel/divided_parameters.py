"""Parameters that FSDP2 or tensor parallelism has divided over ranks: as DTensors.

part_of, divided         this rank's part of an unsharded tensor; no communication
carry_gradients          the gradients that parameters had before they were divided
whole_parameters         while it is open, parameters are unsharded plain tensors
refuse_tools             lets torch's pruning and parametrizations refuse divided parameters
take_whole_values        lets `load_state_dict` of a model take unsharded tensors; `take_whole_states` does so for an optimizer
units, groups            the FSDP2 modules of a model, and their parameter groups
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import PlanError
from paceline.torch_internals import fsdp as internals
from paceline.torch_internals.modules import parameter_table
from paceline.torch_internals.parametrizations import before_replacing
from paceline.world.param_groups import parameters_by_number
from paceline.world.sharded import division_of, is_sharded, local, part_like, whole

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from paceline.torch_internals.fsdp import FSDPParam, FSDPParamGroup

Value = TypeVar("Value")


# -- this rank's part ----------------------------------------------------------------------------------------------------


def part_of(tensor: Tensor, like: DTensor) -> Tensor:
    """Returns this rank's part of an unsharded tensor, divided as the DTensor `like`. Does not communicate."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, like.placements).to_local()


def divided(value: Value, like: object) -> Value | Tensor:
    """Returns an unsharded tensor as a DTensor that is divided as `like`.

    Other values, tensors of another shape, and tensors that are DTensors already are returned as they are.
    """
    if not isinstance(value, Tensor) or not is_sharded(like):
        return value
    if is_sharded(value) or value.shape != like.shape or not value.dim():
        return value
    own = part_of(value.to(like.device), like).clone()
    return part_like(own, like)


def carry_gradients(gradients: Mapping[str, Tensor], model: nn.Module) -> None:
    """Gives parameters that strategies have put in the place of others the gradients that these had. Does not communicate.

    Args:
        gradients: by the names of the parameters.
        model: after the strategies; a stage of a pipeline has some of its parameters.
    """
    for name, parameter in model.named_parameters():
        gradient = gradients.get(name)
        if parameter.grad is None and is_sharded(parameter) and gradient is not None:
            parameter.grad = part_like(part_of(gradient, parameter).clone(), parameter)


# -- whole parameters ----------------------------------------------------------------------------------------------------


@contextmanager
def whole_parameters(model: nn.Module, writeback: bool = False) -> Iterator[None]:
    """While it is open, each divided parameter of `model` is an unsharded plain parameter. Ranks: all that hold parts.

    Args:
        model: any module; parameters that are not divided stay as they are.
        writeback: whether each rank writes its part of changes back, also if an exception ends the block. On one process,
            too, changes that were made before an exception remain.

    Raises:
        PlanError: `shard-changed`, at its end, if a divided parameter was removed from its module.
    """
    places: list[tuple[dict[str, Tensor | None], str, DTensor]] = []
    for module in model.modules():
        slots = parameter_table(module)
        for name, parameter in slots.items():
            if is_sharded(parameter):
                places.append((slots, name, parameter))
    # A parameter that several modules share is gathered once, and stays shared.
    gathered: dict[int, nn.Parameter] = {}
    # DTensor cannot detach a parameter in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        for slots, name, parameter in places:
            if id(parameter) not in gathered:
                gathered[id(parameter)] = nn.Parameter(whole(parameter.detach()), parameter.requires_grad)
            slots[name] = gathered[id(parameter)]
    # A model without divided parameters has nothing that FSDP2 would search for.
    disturbed = model
    if not places:
        disturbed = nn.Module()
    try:
        with undisturbed(disturbed):
            yield
    finally:
        removed = [name for slots, name, _ in places if name not in slots]
        for slots, name, parameter in places:
            changed = slots.get(name)
            slots[name] = parameter
            if writeback and changed is not None:
                local(parameter.detach()).copy_(part_of(changed.detach(), parameter))
        if removed:
            raise removed_error(removed[0])


def refuse_tools() -> None:
    """Makes torch's tools, such as pruning, refuse divided parameters: few can compute with one, and FSDP2 would lose others.

    They raise PlanError: `shard-changed`. Whole parameters are no concern of it.
    """
    before_replacing(_refuse_divided)


def _refuse_divided(parameter: object) -> None:
    if isinstance(parameter, Tensor) and (is_sharded(parameter) or isinstance(parameter, internals.WholeParameter)):
        raise _changed(f"a parameter of shape {list(parameter.shape)} cannot be pruned or parametrized.")


def removed_error(name: str) -> PlanError:
    """Returns the error for a divided parameter that is no longer in its module."""
    return _changed(f"{name} is no longer a parameter of its module.")


def _changed(what: str) -> PlanError:
    return PlanError(
        "shard-changed",
        what,
        why="pruning and parametrizing put another parameter in its place, and this one is divided over ranks since `prepare`",
        fix="prune or parametrize the model before `prepare`",
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """While it is open, FSDP2 does not search for its shards after `load_state_dict`: other parameters are in their place."""
    with internals.without_taking_up(group_parameters(model)):
        yield


def take_whole_values(model: nn.Module) -> None:
    """Registers hooks so that `load_state_dict` of the model and its modules takes unsharded tensors for divided parameters."""

    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in parameter_table(module).items():
            if parameter is not None and prefix + name in state:
                # FSDP2 puts the shard in the place of a whole parameter by a hook of its own, which runs after this one.
                state[prefix + name] = divided(state[prefix + name], internals.shard_behind(parameter))

    for module in model.modules():
        if any(is_sharded(parameter) for parameter in parameter_table(module).values()):
            module.register_load_state_dict_pre_hook(convert)


def take_whole_states(optimizer: Optimizer) -> None:
    """Divides the states that the optimizer has of divided parameters, and those that its `load_state_dict` gets later."""

    def convert(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        parameters = parameters_by_number(optimizer, saved)
        states = {}
        for number, state in saved["state"].items():
            like = parameters.get(number)
            # Whole states of a parameter that one rank steps stay whole.
            if like is not None and division_of(optimizer, like) is not None:
                states[number] = state
                continue
            states[number] = {key: divided(value, like) for key, value in state.items()}
        return {**saved, "state": states}

    optimizer.register_load_state_dict_pre_hook(convert)
    for parameter, state in optimizer.state.items():
        if is_sharded(parameter) and division_of(optimizer, parameter) is None:
            state.update({key: divided(value, parameter) for key, value in state.items()})


# -- FSDP2 modules -------------------------------------------------------------------------------------------------------


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """Yields the modules on which `fully_shard` or `replicate` was called."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Returns the parameter groups, each of which is gathered and reduced together, in the order of modules."""
    in_order: dict[FSDPParamGroup, None] = {}
    for unit in units(model):
        in_order |= dict.fromkeys(internals.parameter_groups(unit))
    return list(in_order)


def group_parameters(model: nn.Module) -> Iterator[FSDPParam]:
    """Yields the parameters of all groups, as FSDP2's own objects."""
    for group in groups(model):
        yield from internals.group_parameters(group)


def refresh(model: nn.Module) -> None:
    """Makes every unit use the parameters that were set in place of its own."""
    for parameter in group_parameters(model):
        internals.take_up_sharded_parameter(parameter)
