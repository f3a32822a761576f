"""Averages gradients that no strategy reduces in the backward pass, and broadcasts values: many tensors in few messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel.data.division import batches, flattened
from paceline.world.sharded import local, plain_tensors

T = TypeVar("T", bound=torch.Tensor)
# Returns the ranks that hold the same part of a parameter as this one, and average its gradients: see `Mesh.same_part_group`.
GroupOf: TypeAlias = Callable[[torch.Tensor], dist.ProcessGroup]

CHUNK = 32 << 20  # bytes that are flattened at once


def average_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Averages gradients in place. On a rank that did not use a parameter, its gradient counts as zero.

    To average gradients a second time does not change them, since they are equal on all ranks then.

    Ranks: all of the group.
    """
    # Also those that are frozen now: an earlier pass of the window may have computed their gradients.
    trained = [parameter for parameter in parameters if parameter.is_floating_point() or parameter.is_complex()]
    if not trained:
        return
    device = trained[0].device
    # All ranks must reduce the same gradients: those of parameters that any of them has used. A parameter that no rank has
    # used keeps None, so that an optimizer with momentum does not step it.
    has_gradient = [parameter.grad is not None for parameter in trained]
    used = torch.tensor(has_gradient, dtype=torch.int32, device=device)
    dist.all_reduce(used, group=group)
    ranks = dist.get_world_size(group)
    gradients = []
    for parameter, count in zip(trained, used.tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(local(parameter.grad))
    for chunk in batches(gradients, CHUNK):
        with flattened(chunk) as flat:
            dist.all_reduce(flat.div_(ranks), group=group)


def broadcast_tensors(tensors: list[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Copies the tensors of one rank of the group into those of all ranks. Ranks: all of the group."""
    # A tensor that is made of others (torchao's, of few bits) need not know how to be flattened.
    plain = [part for tensor in tensors for part in plain_tensors(tensor).values()]
    with torch.no_grad():
        for chunk in batches(plain, CHUNK):
            with flattened(chunk) as flat:
                dist.broadcast(flat.view(torch.uint8), group=group, group_src=source)  # gloo knows no float8


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """Returns this rank's part of all parameters and buffers that have values."""
    return [local(tensor.detach()) for tensor in tensors_of(model) if tensor.numel() and not tensor.is_meta]


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Returns all parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def broadcast_values(tensors: Iterable[torch.Tensor], group_of: GroupOf) -> None:
    """Gives all ranks that hold the same part of a tensor the values of the first of them. Ranks: all.

    Args:
        tensors: parameters and buffers, which may be divided (DTensors).
        group_of: returns the ranks that hold the same part of a tensor as this one.
    """
    with_values = [tensor for tensor in tensors if tensor.numel() and not tensor.is_meta]
    for group, same in by_group(with_values, group_of).items():
        broadcast_tensors([local(tensor.detach()) for tensor in same], group)


def by_group(tensors: Iterable[T], group_of: GroupOf) -> dict[dist.ProcessGroup, list[T]]:
    """Returns the tensors by the ranks that hold the same part of them, in order."""
    groups: dict[dist.ProcessGroup, list[T]] = {}
    for tensor in tensors:
        groups.setdefault(group_of(tensor), []).append(tensor)
    return groups


def begin_average(
    gradient: torch.Tensor | None, parameter: torch.Tensor, is_sparse: bool, group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work | None]:
    """Begins to average one gradient, which may be a list of rows.

    Args:
        gradient: None on a rank that has none.
        parameter: whose gradient it is.
        is_sparse: whether all ranks have lists of rows.
        group: the ranks.

    Returns:
        What becomes the mean, and the work to wait for.
    """
    if is_sparse:
        if gradient is None:
            no_places = torch.zeros(1, 0, dtype=torch.int64, device=parameter.device)
            gradient = torch.sparse_coo_tensor(no_places, parameter.new_zeros(0, *parameter.shape[1:]), parameter.shape)
        mean = gradient.coalesce() / dist.get_world_size(group)
    elif gradient is None:
        mean = torch.zeros_like(parameter)
    else:
        mean = gradient.to_dense() / dist.get_world_size(group)
    work: dist.Work | None = dist.all_reduce(mean, group=group, async_op=True)
    return mean, work
