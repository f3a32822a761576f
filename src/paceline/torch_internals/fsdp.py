"""The private side of FSDP2 (`torch.distributed.fsdp.fully_shard` and its form `replicate`).

    unit              a module that `fully_shard` or `replicate` was called on; public: `FSDPModule`
    parameter group   the parameters of a unit that are gathered and reduced together
    group parameter   one parameter of a group: its shard, and the whole (unsharded) parameter while that exists
    pending gradient  the gradient of a whole parameter that no communication has seen yet

Where torch keeps a pending gradient depends on the release. Up to 2.14 a backward pass without communication moves it,
in the dtype of the reduction, to `FSDPParam.unsharded_accumulated_grad`. From 2.15 on it stays in the whole parameter's
`.grad`, and that attribute only reads it. `pending_gradient` and `set_pending_gradient` are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def replicate_function() -> Callable[..., Any]:
    """FSDP2's `replicate`, which averages gradients and divides nothing; torch has not given it a public place yet."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate


def parameter_groups(unit: FSDPModule) -> list[FSDPParamGroup]:
    """The parameter groups of one unit; none where it has no parameters of its own."""
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # In torch 2.11 a unit has one group at most.
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def group_parameters(group: FSDPParamGroup) -> list[FSDPParam]:
    """The parameters of a group, in the order in which they are packed for communication."""
    return list(group.fsdp_params)


def group_modules(group: FSDPParamGroup) -> tuple[nn.Module, ...]:
    """The modules on which `fully_shard` was called for this group."""
    return tuple(group.modules)


def sharded_parameter(parameter: FSDPParam) -> nn.Parameter:
    """The parameter that the module shows and the optimizer steps: this rank's shard, as a DTensor."""
    return parameter.sharded_param


def whole_parameter(parameter: FSDPParam) -> torch.Tensor | None:
    """The whole parameter with which the module computes, its memory perhaps given up; None before it was gathered."""
    return getattr(parameter, "_unsharded_param", None)


def take_up_sharded_parameter(parameter: FSDPParam) -> None:
    """Lets a group take up the parameter that was put in the place of its shard."""
    parameter.reset_sharded_param()


@contextmanager
def without_taking_up(parameters: Iterable[FSDPParam]) -> Iterator[None]:
    """While it is open, `load_state_dict` does not make FSDP2 look for the shards of these group parameters."""
    silenced = list(parameters)
    for parameter in silenced:
        parameter.reset_sharded_param = lambda: None
    try:
        yield
    finally:
        for parameter in silenced:
            del parameter.reset_sharded_param


# -- gradients -----------------------------------------------------------------------------------------------------------


def pending_gradient(parameter: FSDPParam) -> torch.Tensor | None:
    """The gradient of a group parameter that no communication has seen, in the whole parameter's shape; None for none."""
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    whole = whole_parameter(parameter)
    return None if whole is None else whole.grad


def set_pending_gradient(parameter: FSDPParam, gradient: torch.Tensor | None) -> None:
    """Puts `gradient` in the place of a group parameter's pending one; None clears it.

    Args:
        parameter: gathered at least once, unless `gradient` is None.
        gradient: in the dtype in which FSDP2 accumulates, as `pending_gradient` gave it.
    """
    whole = whole_parameter(parameter)
    if _accumulates_apart(parameter):
        parameter.unsharded_accumulated_grad = gradient
        gradient = None
    if whole is not None:
        whole.grad = gradient


def add_zero_gradient(parameter: FSDPParam) -> None:
    """Gives a group parameter that the backward pass left out a gradient of zeros, so that it takes part in a reduction."""
    whole = parameter._unsharded_param
    # From torch 2.15 on the gradient's dtype may differ from the parameter's: then it is that of the reduction.
    whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None) or whole.dtype)


def _accumulates_apart(parameter: FSDPParam) -> bool:
    """Whether pending gradients have an attribute of their own (up to torch 2.14)."""
    return not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


# -- passes --------------------------------------------------------------------------------------------------------------


def left_unfinished(root: FSDPModule) -> bool:
    """Whether an exception ended the last forward or backward pass of this root midway."""
    context = root._get_fsdp_state()._state_ctx
    return context.iter_forward_root is not None or context.post_backward_final_callback_queued


def reset_unfinished(root: FSDPModule) -> None:
    """Makes a root ready for the next forward pass after an exception ended the last pass midway.

    Public as `FSDPModule.reset_iter_state`, which torch 2.11 does not have.
    """
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = root._get_fsdp_state()
    context, communication = state._state_ctx, state._comm_ctx
    if state._device.type != "cpu":
        torch.accelerator.synchronize(state._device)  # instead of a wait for each event of a collective under way
    communication.all_gather_state = communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for member in context.all_states:
        member._modules_to_run_forward.clear()
        member._training_state = TrainingState.IDLE
        for group in _groups_of(member):
            group.finalize_backward()
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def call_before_final_callback(units: Iterable[FSDPModule], callback: Callable[[], None]) -> None:
    """Calls `callback` at the end of each backward pass, before FSDP2 ends it and waits for the last gradients."""

    def wrapped(final: Callable[[], None]) -> Callable[[], None]:
        def call_both() -> None:
            callback()
            final()

        return call_both

    # The first unit that autograd comes to queues its own method.
    for unit in units:
        state: Any = unit._get_fsdp_state()
        state._root_post_backward_final_callback = wrapped(state._root_post_backward_final_callback)


def reduces_gradients(group: FSDPParamGroup) -> bool:
    """Whether backward passes communicate the gradients of this group (`set_requires_gradient_sync`)."""
    return bool(group.reduce_grads)


def reduce_pending(root: FSDPModule, groups: Iterable[FSDPParamGroup]) -> None:
    """Reduces pending gradients outside of a backward pass, group by group, and waits for all of it.

    Ranks: all of the mesh, with their groups in the same order.
    """
    for group in groups:
        group.post_backward()
    state = root._get_fsdp_state()
    # torch 2.15 notes at the start of a backward pass who ends it, and asks for that note at the end.
    if getattr(state._state_ctx, "manual_backward_finalization_active", False) is None:
        state._state_ctx.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def replace_communication(
    group: FSDPParamGroup, gather: AllGather, scatter: ReduceScatter, before_reduction: Callable[[], None]
) -> None:
    """Lets a group communicate through objects of ours.

    Args:
        group: whose parameters are gathered and reduced.
        gather, scatter: instances of classes that `communication_classes` gave.
        before_reduction: called after each backward pass of the group, before its gradients are reduced.
    """
    plain = group.post_backward

    def post_backward(*unused: object) -> None:
        before_reduction()
        plain(*unused)

    # `set_custom_all_gather` is public, but it sets one object for all groups of a unit; each of ours knows its group.
    group._all_gather_comm, group._reduce_scatter_comm, group.post_backward = gather, scatter, post_backward


def communication_of(group: FSDPParamGroup) -> tuple[AllGather, ReduceScatter]:
    """The objects that gather a group's parameters and scatter the sums of its gradients."""
    return group._all_gather_comm, group._reduce_scatter_comm


def communication_classes() -> tuple[type[AllGather], type[ReduceScatter]]:
    """The base classes of objects that gather parameters and that scatter sums of gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    return AllGather, ReduceScatter


@contextmanager
def kept_gathered(units: Iterable[FSDPModule]) -> Iterator[None]:
    """Keeps the parameters of these units whole while it is open: no pass gives them up.

    The public `set_reshard_after_forward` cannot put back a mesh of its own, as a width for `reshard` makes one.
    """
    units = list(units)
    # Modules that were divided together share a group: by its key, so that it is looked at before it is changed.
    before: dict[FSDPParamGroup, tuple[Any, bool]] = {}
    for unit in units:
        for group in parameter_groups(unit):
            before.setdefault(group, (group.post_forward_mesh_info, group.reshard_after_backward))
            group.post_forward_mesh_info = None
            group.reshard_after_backward = False
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for group, (forward, backward) in before.items():
            group.post_forward_mesh_info = forward
            group.reshard_after_backward = backward
