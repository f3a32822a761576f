"""Parameters of FSDP2 that stay whole for several passes, between which torch writes their gradients without autograd."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import TensorWeakRef

from paceline.torch_internals import fsdp

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from paceline.torch_internals.fsdp import FSDPParamGroup


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
        for group in fsdp.parameter_groups(unit):
            before.setdefault(group, (group.post_forward_mesh_info, group.reshard_after_backward))
            group.post_forward_mesh_info = None
            group.reshard_after_backward = False
    for unit in units:
        unit.unshard()
    wholes = [fsdp.whole_parameter(parameter) for group in before for parameter in fsdp.group_parameters(group)]
    trained = [whole for whole in wholes if whole is not None and whole.requires_grad]
    gradients = [_state_of_gradient(whole) for whole in trained]
    fsdp.splitting_groups.update(before)
    try:
        yield
        for whole, gradient in zip(trained, gradients, strict=True):
            if _was_written(whole, gradient):
                for hook in list((whole._post_accumulate_grad_hooks or {}).values()):
                    hook(whole)
    finally:
        fsdp.splitting_groups.difference_update(before)
        for group, (forward, backward) in before.items():
            group.post_forward_mesh_info = forward
            group.reshard_after_backward = backward


def _state_of_gradient(whole: torch.Tensor) -> tuple[TensorWeakRef, int] | None:
    """Returns which tensor the gradient is and how often it was written; None if there is none."""
    gradient = fsdp.own_gradient(whole)
    return None if gradient is None else (TensorWeakRef(gradient), gradient._version)


def _was_written(whole: torch.Tensor, before: tuple[TensorWeakRef, int] | None) -> bool:
    """Returns whether the gradient is another one than before, or was written since."""
    gradient = fsdp.own_gradient(whole)
    if gradient is None or before is None:
        return gradient is not None
    reference, version = before
    # A new tensor may lie where the old one was, so that its `id` would say nothing.
    return reference() is not gradient or gradient._version != version
