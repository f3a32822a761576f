"""`Means`: buckets of gradients are averaged by an all-reduce, and every rank gets the whole mean.

    large gradient     is averaged where it lies
    small gradients    are copied into one flat tensor, of which the new gradients are parts

Gradients are divided before they are summed, as DistributedDataParallel does, so that on 2 ranks both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.data.averages import GroupOf
from paceline.parallel.data.buckets import Bucket, ReductionForm, Slot
from paceline.parallel.data.division import DIRECT
from paceline.torch_internals.tensors import dtensor, is_alone_in_memory
from paceline.world.sharded import is_sharded, local

# Sends gradients that lie in one flat tensor, in the place of the all-reduce, and returns what waits until it holds the means:
# (gradients, their parameters, number of the bucket, whether it is the last of the backward pass).
Send = Callable[[Tensor, list[Tensor], int, bool], Callable[[], None]]


class Means(ReductionForm):
    """The form of `Reducer` that gives every rank whole gradients.

    Args:
        group: the ranks whose gradients are averaged.
        cap_mb: small gradients are packed up to this many MiB.
        device: that of the gradients.
        hook: takes the place of the all-reduce, as a communication hook does.
        group_of: returns the ranks of `group` that hold the same part of a parameter; None if all of them do.
    """

    bounds_memory = False  # what is sent becomes the gradient, so that waiting would free no memory

    def __init__(
        self,
        group: dist.ProcessGroup,
        cap_mb: float,
        device: torch.device,
        hook: Send | None = None,
        group_of: GroupOf | None = None,
    ) -> None:
        self.group = group
        self._group_of = group_of or (lambda _: group)
        self.cap = int(cap_mb * 2**20)
        self._hook = hook
        # An accelerator needs larger messages than a CPU until the time that each takes is no longer felt.
        self._alone_from = DIRECT if device.type == "cpu" else max(DIRECT, self.cap // 4)
        # Placements of gradients that are divided over other axes than those of this group, for `put`.
        self._placements: dict[Slot, Any] = {}

    def send_by(self, hook: Send) -> None:
        """Lets a hook take the place of the all-reduce from now on; buckets that are there already must be planned anew."""
        self._hook = hook

    def group_of(self, parameter: Tensor) -> dist.ProcessGroup:
        return self._group_of(parameter)

    def travels_alone(self, parameter: Tensor) -> bool:
        """Returns whether a gradient is large enough, and lies in one piece as its parameter does."""
        return self._hook is None and local(parameter).nbytes >= self._alone_from and _is_dense(local(parameter))

    def is_single(self, slot: Slot) -> bool:
        """Returns whether the gradient is a list of rows, which cannot be packed."""
        return slot.is_sparse

    def is_fresh(self, gradient: Tensor | None) -> bool:
        """Returns whether there is one: a mean that is averaged again does not change."""
        return gradient is not None

    def take(self, slot: Slot) -> Tensor | None:
        """Takes this rank's gradient out of `.grad`, where autograd would otherwise add to it while it is being sent."""
        parameter = slot.parameter
        gradient = parameter.grad
        if gradient is None:
            return None
        parameter.grad = None
        if is_sharded(gradient):
            self._placements[slot] = gradient.placements
            gradient = local(gradient)
        return gradient

    def carries_votes(self, bucket: Bucket) -> bool:
        """Returns whether values arrive as they are, at all ranks: a hook would change votes, too."""
        return self._hook is None and self.group_of(bucket.slots[0].parameter) == self.group

    def launch(
        self, bucket: Bucket, gradients: list[Tensor], number: int, is_last: bool, votes: Tensor | None = None
    ) -> None:
        """Sends a bucket: one gradient as it lies, or several in one flat tensor."""
        parameters = [local(slot.parameter) for slot in bucket.slots]
        if bucket.alone:
            gradient = gradients.pop()
            parameter = parameters[0]
            # Two gradients can be views of one memory. Each must be averaged once.
            if gradient.stride() != parameter.stride() or not is_alone_in_memory(gradient):
                gradient = torch.empty_like(parameter).copy_(gradient)
            flat = _in_one_row(gradient, parameter)
        else:
            rows = [_in_one_row(gradient, like) for gradient, like in zip(gradients, parameters, strict=True)]
            if votes is not None:
                rows.append(votes)
                parameters.append(votes)
            flat = bucket.memory
            # The memory of the last window is used again, unless the script still has one of its gradients.
            if flat is None or not is_alone_in_memory(flat):
                flat = bucket.memory = torch.cat(rows)
            else:
                torch.cat(rows, out=flat)
        if self._hook is None:
            wait = _send(flat, self.group_of(bucket.slots[0].parameter))
        else:
            wait = self._hook(flat, [slot.parameter for slot in bucket.slots], number, is_last)

        def results() -> list[Tensor]:
            wait()
            return _parts(flat, parameters)

        bucket.wait = results

    def put(self, slot: Slot) -> None:
        """Sets `.grad`."""
        parameter = slot.parameter
        result = slot.result
        assert result is not None
        if is_sharded(parameter):
            placements = self._placements.get(slot, parameter.placements)
            result = dtensor(result, parameter.device_mesh, placements, parameter.shape, parameter.stride())
        parameter.grad = None
        parameter.grad = result

    def reset(self) -> None:
        """Drops the placements of the window."""
        self._placements.clear()


def _send(flat: Tensor, group: dist.ProcessGroup) -> Any:
    if dist.get_world_size(group) == 1:  # an expert that no other rank has
        return lambda: None
    work = dist.all_reduce(flat.mul_(1 / dist.get_world_size(group)), group=group, async_op=True)
    assert work is not None
    return work.wait


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether the elements lie in one piece without gaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _in_one_row(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Returns the elements of a gradient in the order in which those of the parameter lie. Shape: [elements]."""
    if parameter.is_contiguous() or not _is_dense(parameter):
        return gradient.reshape(-1)
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def _parts(flat: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Returns the part of each parameter, in its memory layout."""
    parts: list[Tensor] = []
    rows = flat.split([parameter.numel() for parameter in parameters])
    for row, parameter in zip(rows, parameters, strict=True):
        if parameter.is_contiguous() or not _is_dense(parameter):
            part = row.view(parameter.shape)
        else:
            part = row.as_strided(parameter.shape, parameter.stride())
        # `.data` is no view for autograd, which refuses some operations on gradients that are.
        parts.append(part.data)
    return parts
