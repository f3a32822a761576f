"""`Rows`: buckets of gradients are reduced to the rows of each rank, and `.grad` becomes a DTensor of them.

A gradient is whole until its bucket is sent, and freed then. With `Shard(0)` a rank holds [N / ranks rounded up, ...] of
[N, ...]; the last ranks may have fewer rows or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.parallel.data.buckets import Bucket, ReductionForm, Slot
from paceline.parallel.data.division import dtensor, even, pack, packed_parts, packed_width, rows, travels_alone
from paceline.torch_internals.dispatch import accumulates
from paceline.world.mesh import Mesh, register_unit
from paceline.world.sharded import is_sharded, local
from paceline.world.transport import transport_of
from paceline.world.works import wait_all


class Rows(ReductionForm):
    """The form of `Reducer` that gives each rank its rows of the gradients.

    Args:
        mesh: of the run.
        cap_mb: small gradients are packed up to this many MiB, and at most this many MiB are being reduced at a time.
    """

    bounds_memory = True

    def __init__(self, mesh: Mesh, cap_mb: float) -> None:
        self._mesh = mesh.along("shard")
        self._rows_group = self._mesh.get_group()
        self.group: dist.ProcessGroup = mesh.gradient_group
        self.cap = int(cap_mb * 2**20)
        self._rank, self._ranks = dist.get_rank(self._rows_group), dist.get_world_size(self._rows_group)
        self._transport = transport_of(self._rows_group, torch.device(mesh.device_type))
        self._width = dist.get_world_size(self.group)
        # The ranks that hold the same rows as this one; None where no rank does.
        self._replicas = None
        if self._width > self._ranks:
            self._replicas = mesh.along(("replicate", "cp")).get_group()
        self._tag = register_unit(self.group)
        self.earlier: dict[Tensor, Any] = {}  # gradients that were reduced in earlier windows, and not cleared since
        self._outputs: dict[Bucket, Tensor] = {}  # what is summed over the replicas at the end

    def travels_alone(self, parameter: Tensor) -> bool:
        """Returns whether a gradient is large."""
        return travels_alone(parameter)

    def is_single(self, slot: Slot) -> bool:
        """Returns whether a parameter has no dimensions, and so no rows: each rank gets its whole gradient."""
        return slot.parameter.dim() == 0

    def is_fresh(self, gradient: Tensor | None) -> bool:
        """Returns whether it is whole."""
        return gradient is not None and not is_sharded(gradient)

    def watch(self, slot: Slot) -> RemovableHandle:
        """Registers a hook that runs before autograd accumulates: it cannot add a plain gradient to a DTensor."""
        parameter = slot.parameter

        def before(_: Tensor) -> None:
            if (parameter.grad is None and parameter not in self.earlier) or not accumulates(parameter):
                return
            # A script that has cleared the gradient by itself has cleared what was set aside, too.
            if parameter.grad is None and not (slot.bucket is not None and slot.bucket.launched):
                self.earlier.pop(parameter, None)
            self._set_aside(parameter)

        # torch refuses a hook on a frozen parameter.
        is_trained = parameter.requires_grad
        handle: RemovableHandle = parameter.requires_grad_(True).register_hook(before)
        parameter.requires_grad_(is_trained)
        return handle

    def _set_aside(self, parameter: Tensor) -> None:
        if is_sharded(parameter.grad):
            self.earlier[parameter] = parameter.grad
            parameter.grad = None

    def take(self, slot: Slot) -> Tensor | None:
        """Takes the whole gradient; rows of an earlier window are set aside."""
        parameter = slot.parameter
        self._set_aside(parameter)
        gradient = parameter.grad
        parameter.grad = None
        return gradient

    def launch(
        self, bucket: Bucket, gradients: list[Tensor], number: int, is_last: bool, votes: Tensor | None = None
    ) -> None:
        """Begins a reduce-scatter over the ranks along `shard`."""
        if bucket.alone:
            gradient = sent = gradients.pop().contiguous()
            output = torch.empty_like(rows(gradient, self._ranks)[self._rank])
            parts = [output]
            if even(gradient, self._ranks):
                handle = self._transport.reduce_scatter(output.view(-1), gradient.view(-1), tag=self._tag)
            else:
                handle = self._transport.reduce_parts(output, rows(gradient, self._ranks), self._tag)
        else:
            # [ranks, width]: row r holds the rows that rank r gets of all gradients, one gradient after the other.
            sent = gradients[0].new_empty((self._ranks, packed_width(gradients, self._ranks)))
            pack(sent, gradients)
            output = torch.empty_like(sent[0])
            parts = packed_parts(output, gradients, self._rank, self._ranks)
            handle = self._transport.reduce_scatter(output, sent.view(-1), tag=self._tag)
            gradients.clear()
        memory = [sent]  # which must live until the reduction has ended

        def results() -> list[Tensor]:
            handle.wait()
            memory.clear()
            # The mean over all ranks: those along the other axes are summed in `complete`.
            output.div_(self._width)
            self._outputs.setdefault(bucket, output)  # the output of the second round is added to that of the first
            return parts

        bucket.wait = results

    def complete(self) -> None:
        """Sums the rows over the other axes: fewer and larger messages than one for each parameter."""
        if self._replicas is None:
            return
        wait_all([dist.all_reduce(output, group=self._replicas, async_op=True) for output in self._outputs.values()])

    def put(self, slot: Slot) -> None:
        """Makes `.grad` a DTensor of this rank's rows, with those of earlier windows."""
        parameter = slot.parameter
        part = slot.result
        assert part is not None
        earlier = self.earlier.pop(parameter, None)
        if earlier is not None:
            part.add_(local(earlier))
        parameter.grad = None
        parameter.grad = self._divided(part, parameter)

    def _divided(self, part: Tensor, parameter: Tensor) -> Tensor:
        return dtensor(part, self._mesh, parameter.shape)

    def leave(self, slot: Slot) -> None:
        """Gives back the gradient of an earlier window."""
        if slot.parameter in self.earlier:
            slot.parameter.grad = self.earlier.pop(slot.parameter)

    def reset(self) -> None:
        """Drops what belongs to the window."""
        self.earlier.clear()
        self._outputs.clear()

    # -- beside `.grad` ------------------------------------------------------------------------------------------

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Clears what was set aside, after the script has cleared `.grad`."""
        for parameter in parameters:
            self.earlier.pop(parameter, None)

    def pending(self, slots: Iterable[Slot]) -> dict[Tensor, Tensor]:
        """Returns rows that were reduced in an earlier window and not cleared since."""
        reduced: dict[Tensor, Tensor] = {}
        for slot in slots:
            gradient = slot.parameter.grad
            if is_sharded(gradient):
                reduced[slot.parameter] = gradient
        return reduced | self.earlier

    def restore(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Restores such rows, beside whole gradients that are in `.grad` already."""
        for parameter, part in gradients.items():
            reduced = self._divided(part, parameter)
            if parameter.grad is None:
                parameter.grad = reduced
            else:
                self.earlier[parameter] = reduced
