"""FSDP2's shards: their memory, with the padding that makes those of all ranks equally long; units that stay gathered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from paceline.torch_internals.dtensor import local_tensor
from paceline.torch_internals.fsdp import SPLITTING, group_parameters, own_gradient, parameter_groups, whole_parameter

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from paceline.torch_internals.fsdp import FSDPParam, FSDPParamGroup


def shard_memory(parameter: FSDPParam) -> Tensor:
    """Returns the memory of a shard, which may be a tensor of a subclass.

    Shape: (elements of the longest shard,)
    """
    return parameter._sharded_param_data


def move_shard(parameter: FSDPParam, memory: Tensor) -> bool:
    """Copies a shard to other memory, in which it is from now on; not one that is there already, or has no values yet.

    Args:
        parameter: the group parameter.
        memory: of the shape and dtype of `shard_memory`.

    Returns:
        Whether something was copied.
    """
    shard = cast("DTensor", parameter.sharded_param)
    own = local_tensor(shard)
    # Of storages, since a rank may have no rows of a parameter: a tensor without elements has no address.
    if own.is_meta or own.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
        return False
    # What a script has put in the place of the shard becomes FSDP2's first.
    parameter.reset_sharded_param()
    with torch.no_grad():
        memory.copy_(parameter._sharded_param_data)
    parameter._sharded_param_data = memory
    dim = parameter.fsdp_placement.dim
    num_rows = own.size(dim) if own.numel() else 0
    shard._local_tensor = memory.view(parameter.padded_sharded_param_size).narrow(dim, 0, num_rows)
    return True


@contextmanager
def kept_gathered(units: Iterable[FSDPModule]) -> Iterator[None]:
    """Keeps the parameters of these units whole inside the context: no forward or backward pass reshards them.

    Split backward passes write the gradients of weights without autograd. The hooks on accumulated gradients are called for
    these at the end.

    The public `set_reshard_after_forward` cannot restore the setting afterwards if it was a mesh of its own, which a width
    for `reshard` makes.
    """
    units = list(units)
    # Modules that were sharded together share a group, which then appears under several units. `setdefault` saves its
    # settings the first time, before they are changed, and not again.
    before: dict[FSDPParamGroup, tuple[Any, bool]] = {}
    for unit in units:
        for group in parameter_groups(unit):
            before.setdefault(group, (group.post_forward_mesh_info, group.reshard_after_backward))
            group.post_forward_mesh_info = None
            group.reshard_after_backward = False
    for unit in units:
        unit.unshard()
    wholes = [whole_parameter(parameter) for group in before for parameter in group_parameters(group)]
    trained = [whole for whole in wholes if whole is not None and whole.requires_grad]
    gradients = [_state_of_gradient(whole) for whole in trained]
    SPLITTING.update(before)
    try:
        yield
        for whole, gradient in zip(trained, gradients, strict=True):
            if _was_written(whole, gradient):
                for hook in list((whole._post_accumulate_grad_hooks or {}).values()):
                    hook(whole)
    finally:
        SPLITTING.difference_update(before)
        for group, (forward, backward) in before.items():
            group.post_forward_mesh_info = forward
            group.reshard_after_backward = backward


def _state_of_gradient(whole: Tensor) -> tuple[TensorWeakRef, int] | None:
    """Returns which tensor the gradient is and how often it was written; None if there is none."""
    gradient = own_gradient(whole)
    return None if gradient is None else (TensorWeakRef(gradient), gradient._version)


def _was_written(whole: Tensor, before: tuple[TensorWeakRef, int] | None) -> bool:
    """Returns whether the gradient is another one than before, or was written since."""
    gradient = own_gradient(whole)
    if gradient is None or before is None:
        return gradient is not None
    reference, version = before
    # A new tensor may lie where the old one was, so that its `id` would say nothing.
    return reference() is not gradient or gradient._version != version
