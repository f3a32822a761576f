"""`deepspeed.utils.safe_get_*` and `safe_set_*`: values, gradients and optimizer states of a parameter, at every stage.

full     the whole tensor, on every rank; all ranks call (it may be gathered), with the same parameter
local    what this rank keeps of it: its rows, or all of it where nothing is divided
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.data.division import ByParameters, ByRows
from paceline.parallel.divided_parameters import part_of
from paceline.run.run import live_runs
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import division_of, is_sharded, local, whole
from paceline_deepspeed import replaced

Result = TypeVar("Result")


def _of_current(function: Callable[..., Result]) -> Callable[..., Result]:
    """Lets a function also take a parameter that a script took from its model before `initialize`."""

    @wraps(function)
    def call(param: Tensor, *args: Any, **keywords: Any) -> Result:
        return function(replaced.current(param), *args, **keywords)

    return call


@_of_current
def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    return _full(param.detach())


@_of_current
def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Returns the whole gradient, between `backward` and `step`; None where there is none. Ranks: all.

    Under fp16 it is multiplied by the loss scale until `step` divides it.
    """
    if param.grad is None:
        return None
    return _full(param.grad)


@_of_current
def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Returns a whole state of the optimizer's (`exp_avg`); None before the first step. Ranks: all."""
    optimizer = _optimizer(param)
    if optimizer is None:
        return None
    division = division_of(optimizer, param)
    state = optimizer.state.get(param, {}).get(optim_state_key)
    # Only what divides an optimizer by rows or by whole parameters has to be asked for the rest.
    if not isinstance(division, ByRows | ByParameters):
        if state is None:
            return None
        return _full(state)
    if state is not None and division.keeps(param):
        state = division.join(param, state)
    if is_sharded(state):
        return _full(state)
    if isinstance(division, ByParameters):
        return _of_owner(param, division, state)
    # By rows, what is not sharded is a number, which is the same everywhere.
    number: Tensor | None = state
    return number


def _of_owner(param: Tensor, division: ByParameters, own_state: Tensor | None) -> Tensor | None:
    """Sends a state that one rank along `shard` keeps whole to all of them."""
    owner = division.owner(param)
    # First the owner tells whether it has the state, and whether that is a number: the others allocate by it.
    num_dims = torch.tensor([-1])
    if own_state is not None:
        num_dims = torch.tensor([own_state.dim()])
    dist.broadcast(num_dims, group=division.group, group_src=owner)
    if num_dims.item() < 0:  # the owner has none
        return None
    if own_state is not None:
        data = own_state.detach().float().clone()
    else:
        # A state with dims has the shape of its parameter.
        example = torch.zeros(())
        if num_dims.item():
            example = param.detach()
        data = torch.empty_like(example, dtype=torch.float32)
    dist.broadcast(data, group=division.group, group_src=owner)
    return data


@_of_current
def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    _put(param, value)


@_of_current
def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    if param.grad is not None:
        _put(param.grad, value)


@_of_current
def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    optimizer = _optimizer(param)
    state = _state_of(optimizer, param, optim_state_key)
    if state is None:
        return
    division = division_of(optimizer, param)
    if isinstance(division, ByRows | ByParameters):
        # By rows it becomes a DTensor of the parameter's shape over the same memory; `_put` writes this rank's rows.
        state = division.join(param, state)
    _put(state, value)


@_of_current
def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    own_part: Tensor = local(param.detach())
    return own_part.float()


@_of_current
def safe_get_local_grad(param: Tensor) -> Tensor | None:
    return None if param.grad is None else local(param.grad.detach())


@_of_current
def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    state = _state_of(_optimizer(param), param, optim_state_key)
    return None if state is None else local(state)


@_of_current
def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    _put_local(param, value)


@_of_current
def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    if param.grad is not None:
        _put_local(param.grad, value)


@_of_current
def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    state = _state_of(_optimizer(param), param, optim_state_key)
    if state is not None:
        _put_local(state, value)


def _full(tensor: Tensor) -> Tensor:
    """Returns a copy, which later steps do not change: scripts compare values from before a step with those after it."""
    full: Tensor = whole(tensor.detach())
    if full.is_floating_point():
        full = full.float()
    return full.clone()


def _put(target: Tensor, value: Tensor) -> None:
    """Writes this rank's part of a whole value."""
    if is_sharded(target):
        value = part_of(value.to(local(target).dtype), target)
    _put_local(target, value)


@torch.no_grad()
def _put_local(target: Tensor, value: Tensor) -> None:
    """Writes what this rank keeps of a tensor."""
    local(target).copy_(value)


def _state_of(optimizer: Any, param: Tensor, key: str) -> Any:
    """Returns the state that this rank's optimizer keeps of a parameter under a key."""
    if optimizer is None:
        return None
    return optimizer.state.get(param, {}).get(key)


def _optimizer(param: Tensor) -> Any:
    """Finds the optimizer that steps a parameter."""
    for run in live_runs():
        for prepared in run.prepared.optimizers:
            if any(param is candidate for candidate in parameters_of(prepared)):
                return prepared.optimizer
    return None
