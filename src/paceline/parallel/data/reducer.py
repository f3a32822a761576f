"""`Reducer`: reduces gradients of unsharded parameters to the rows of each rank, while the backward pass still runs.

    backward     when the last gradient of a bucket is computed, the bucket is reduced and its gradients are freed
    holding      gradients accumulate in `.grad`, without communication
    finish       the ranks exchange which parameters any of them used, and reduce the remaining buckets, with zeros for
                 gradients that a rank lacks. Then each gradient is a DTensor of the parameter's shape with `Shard(0)`,
                 of which a rank holds its rows only

A large gradient is a bucket of its own and is sent without a copy; small ones are packed into one tensor. If a gradient is
computed after its bucket was reduced (a second use in a reentrant checkpoint), the bucket is reduced a second time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.parallel.data.averages import average_gradients, broadcast_tensors
from paceline.parallel.data.division import (
    batches,
    dtensor,
    even,
    pack,
    packed_parts,
    packed_width,
    rows,
    travels_alone,
)
from paceline.world.mesh import Mesh, cpu_group, register_unit
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import is_sharded, local
from paceline.world.transport import transport_of
from paceline.world.works import Handle, wait_all


class _Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        parameters: one large parameter, or several small ones.
        bytes: of all its gradients.
        alone: whether it is one large parameter, whose gradient is sent without a copy.
        arrived: parameters whose gradient was computed in this window.
        launched: whether its reduction in this window has begun.
        handle: waits for the reduction.
        sent: the input of the reduction, which must live until the reduction has ended.
        output: the result: this rank's rows.
        parts: views of the result, one for each parameter.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.bytes = sum(p.numel() * p.element_size() for p in parameters)
        self.alone = len(parameters) == 1 and travels_alone(parameters[0])
        self.reset()

    def reset(self) -> None:
        """Prepares the bucket for the next window."""
        self.arrived: set[Tensor] = set()
        self.launched = False
        self.handle: Handle | None = None
        self.sent: Tensor | None = None
        self.output: Tensor | None = None
        self.parts: list[Tensor] = []


class Reducer:
    """Reduces the gradients of one model.

    Args:
        model: its parameters and buffers get rank 0's values.
        mesh: of the run.
        cap_mb: small gradients are packed up to this many MiB, and at most this many MiB are being reduced at a time.
        broadcast_buffers: whether rank 0's buffers are broadcast before each forward pass in training.

    Ranks: all of the gradient group construct one for the same model.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, cap_mb: float, broadcast_buffers: bool) -> None:
        self._mesh = mesh.along("shard")
        self._group, self._all = self._mesh.get_group(), mesh.gradient_group
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._transport = transport_of(self._group, torch.device(mesh.device_type))
        self._width = dist.get_world_size(self._all)
        # The ranks that hold the same rows as this one; None where no rank does.
        self._replicas = None
        if self._width > self._ranks:
            self._replicas = mesh.along(("replicate", "cp")).get_group()
        # Votes are small and are read on the host at once, so they travel over the CPU.
        self._votes = cpu_group(self._all)
        self._cap = int(cap_mb * 2**20)
        self._tag = register_unit(f"gradients of {type(model).__name__}")
        self._holding = 0
        self._failed = False
        self._next_bucket = 0  # the first bucket that was not launched
        self._under_way: deque[_Bucket] = deque()
        self._reduced: dict[Tensor, Tensor] = {}  # this rank's rows of each gradient of the window
        self._earlier: dict[Tensor, Any] = {}  # gradients that were reduced in earlier windows, and not cleared since
        self._outputs: list[Tensor] = []  # results of the first round, in the order of the buckets
        parameters_and_buffers = (*model.parameters(), *model.buffers())
        values = [tensor.detach() for tensor in parameters_and_buffers if tensor.numel()]
        broadcast_tensors(values, self._all)
        self._parameters = [p for p in model.parameters() if p.requires_grad and p.numel()]
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._plan_buckets()
        for parameter in self._parameters:
            self._watch(parameter)
        if broadcast_buffers and next(model.buffers(), None) is not None:
            self._follow_buffers(model)

    def _watch(self, parameter: nn.Parameter) -> None:
        """Registers hooks that run before and after autograd accumulates into a parameter's gradient."""
        parameter.register_hook(lambda _: self._set_aside(parameter))
        parameter.register_post_accumulate_grad_hook(self._gradient_came)

    def _plan_buckets(self) -> None:
        """Assigns parameters to buckets, in the order in which the backward pass completes them: the last parameter first."""
        order = [parameter for parameter in reversed(self._parameters) if parameter.dim()]
        place: dict[Tensor, int] = {parameter: number for number, parameter in enumerate(order)}
        groups: list[list[Tensor]] = []
        small: list[Tensor] = []
        for parameter in order:
            if travels_alone(parameter):
                groups.append([parameter])
            else:
                small.append(parameter)
        groups += batches(small, self._cap)

        def completed_at(group: list[Tensor]) -> int:
            # A bucket is complete when the last of its gradients is computed.
            return max(place[parameter] for parameter in group)

        groups.sort(key=completed_at)
        self._buckets = [_Bucket(group) for group in groups]
        self._bucket: dict[Tensor, _Bucket] = {}
        for bucket in self._buckets:
            self._bucket.update(dict.fromkeys(bucket.parameters, bucket))

    def _follow_buffers(self, model: nn.Module) -> None:
        """Registers a hook that broadcasts rank 0's buffers before each forward pass in training."""
        # A function with a weak reference: a copy of the model copies its hooks, and must not communicate.
        owner = weakref.ref(model)

        def broadcast(module: nn.Module, _: object) -> None:
            if module is owner() and module.training and not self._holding and torch.is_grad_enabled():
                buffers = [buffer.detach() for buffer in module.buffers() if buffer.numel()]
                broadcast_tensors(buffers, self._all)

        model.register_forward_pre_hook(broadcast)

    # -- backward --------------------------------------------------------------------------------------------

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While it is open, nothing is reduced."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1

    def _set_aside(self, parameter: Tensor) -> None:
        """Moves a reduced gradient out of `.grad`: autograd cannot add a plain gradient to a DTensor."""
        if is_sharded(parameter.grad):
            self._earlier[parameter] = parameter.grad
            parameter.grad = None

    def _gradient_came(self, parameter: Tensor) -> None:
        # The reductions of a failed pass are waited for although their results are dropped: other ranks take part in them.
        if self._failed:
            self._failed = False
            self._wait_for_all()
            self._reset()
        bucket = self._bucket.get(parameter)
        if self._holding or bucket is None or bucket.launched:
            return
        bucket.arrived.add(parameter)
        # Buckets are launched in one fixed order, even if a later one is complete first: all ranks must start the same
        # collectives in the same order.
        while self._next_bucket < len(self._buckets):
            bucket = self._buckets[self._next_bucket]
            if len(bucket.arrived) < len(bucket.parameters):
                return
            self._next_bucket += 1
            self._launch(bucket)

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        # A reduction needs the memory of its input until it has ended. So before more than `cap` bytes are being reduced, the
        # oldest reductions are waited for.
        bytes_under_way = sum(other.bytes for other in self._under_way)
        while self._under_way and bytes_under_way + bucket.bytes > self._cap:
            oldest = self._under_way.popleft()
            bytes_under_way -= oldest.bytes
            self._wait_for(oldest)
        for parameter in bucket.parameters:
            self._set_aside(parameter)
        gradients = []
        for parameter in bucket.parameters:
            gradient = parameter.grad
            if gradient is None:
                # A rank that did not use a parameter contributes zeros, since the other ranks reduce the whole bucket.
                gradient = torch.zeros_like(parameter)
            gradients.append(gradient)
            parameter.grad = None
        bucket.launched = True
        if bucket.alone:
            # [N, ...] -> this rank's rows, [N / ranks rounded up, ...]; the last ranks may have fewer or none.
            gradient = bucket.sent = gradients[0].contiguous()
            output = torch.empty_like(rows(gradient, self._ranks)[self._rank])
            bucket.parts = [output]
            if even(gradient, self._ranks):
                bucket.handle = self._transport.reduce_scatter(output.view(-1), gradient.view(-1), tag=self._tag)
            else:
                bucket.handle = self._transport.reduce_parts(output, rows(gradient, self._ranks), self._tag)
        else:
            # [ranks, width]: row r holds the rows that rank r gets of all gradients, one gradient after the other.
            flat = bucket.sent = gradients[0].new_empty((self._ranks, packed_width(gradients, self._ranks)))
            pack(flat, gradients)
            output = torch.empty_like(flat[0])
            bucket.parts = packed_parts(output, gradients, self._rank, self._ranks)
            bucket.handle = self._transport.reduce_scatter(output, flat.view(-1), tag=self._tag)
        bucket.output = output
        self._under_way.append(bucket)

    def _wait_for(self, bucket: _Bucket) -> None:
        assert bucket.handle is not None and bucket.output is not None
        bucket.handle.wait()
        # The mean over all ranks: those along the other axes are summed in `_sum_over_replicas`.
        bucket.output.div_(self._width)
        if bucket.parameters[0] in self._reduced:  # the second round
            for parameter, part in zip(bucket.parameters, bucket.parts, strict=True):
                self._reduced[parameter].add_(part)
        else:
            self._reduced.update(zip(bucket.parameters, bucket.parts, strict=True))
            self._outputs.append(bucket.output)
        bucket.handle = bucket.output = bucket.sent = None
        bucket.parts = []

    # -- the end of a window ---------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Reduces the remaining gradients. After it, gradients are DTensors. Ranks: all of the gradient group."""
        if self._holding:
            return
        thawed = [p for p in self._frozen if p.requires_grad]
        if thawed:
            average_gradients(thawed, self._all)
        used, late = self._vote()
        if not any(used):
            return
        used_anywhere: set[nn.Parameter] = set()
        for parameter, num_ranks in zip(self._parameters, used, strict=True):
            if num_ranks:
                used_anywhere.add(parameter)
        # First round: the buckets that no gradient has completed, with zeros where this rank has none. A bucket that no rank
        # has used is left out on all of them, because all have the same counts.
        for bucket in self._buckets:
            if not bucket.launched and not used_anywhere.isdisjoint(bucket.parameters):
                self._launch(bucket)
        self._wait_for_all()
        # Second round: gradients that were computed after their bucket was launched, such as those of a second backward pass
        # in the window.
        for bucket, num_ranks in zip(self._buckets, late, strict=True):
            if num_ranks:
                self._launch(bucket)
        self._wait_for_all()
        self._sum_over_replicas(used_anywhere)
        for parameter in self._parameters:
            if parameter in used_anywhere:
                self._set_gradient(parameter)
            elif parameter in self._earlier:
                parameter.grad = self._earlier[parameter]
        self._reset()

    def _reset(self) -> None:
        self._reduced.clear()
        self._earlier.clear()
        self._outputs.clear()
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.reset()

    @property
    def unfinished(self) -> bool:
        """Whether there are gradients that were not reduced, or not completely."""
        return bool(self._fresh()) or any(bucket.arrived for bucket in self._buckets)

    def _fresh(self) -> set[nn.Parameter]:
        """Returns the parameters with a whole gradient, which was not reduced yet."""
        return {p for p in self._parameters if p.grad is not None and not is_sharded(p.grad)}

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Clears gradients of these parameters that are still being reduced, after the script has cleared the others.

        Such gradients come from a backward pass that was not `accelerator.backward`. Their reductions are finished first,
        since the other ranks take part in them.

        Ranks: all, if any gradient is being reduced.
        """
        if any(bucket.arrived for bucket in self._buckets):
            self.finish()
            for parameter in parameters:
                parameter.grad = None

    def backward_failed(self) -> None:
        """Marks the current backward pass as failed: its results are dropped when the next one begins."""
        self._failed = True

    def held_gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rows of gradients that were reduced before, and set aside since."""
        for parameter, gradient in self._earlier.items():
            yield parameter, local(gradient)

    def pending_gradients(self) -> PendingGradients:
        """Returns rows that were reduced in an earlier window and not cleared since."""
        reduced: dict[Tensor, Tensor] = {p: p.grad for p in self._parameters if is_sharded(p.grad)}
        return PendingGradients(reduced | self._earlier)

    def restore_pending(self, pending: PendingGradients) -> None:
        """Restores such rows, beside whole gradients that are in `.grad` already."""
        self._wait_for_all()
        self._reset()
        for parameter, part in pending.gradients.items():
            reduced = dtensor(part, self._mesh, parameter.shape)
            if parameter.grad is None:
                parameter.grad = reduced
            else:
                self._earlier[parameter] = reduced

    def _vote(self) -> tuple[list[int], list[int]]:
        """Counts ranks, by one all-reduce.

        Returns:
            For each parameter, the number of ranks that have a gradient of this window; for each bucket, the number of ranks
            that have a gradient which was computed after the bucket was launched.
        """
        fresh = self._fresh()
        arrived: set[Tensor] = set(fresh)
        for bucket in self._buckets:
            arrived |= bucket.arrived
        used = [parameter in arrived for parameter in self._parameters]
        late = [bucket.launched and not fresh.isdisjoint(bucket.parameters) for bucket in self._buckets]
        bytes_of_all = sum(bucket.bytes for bucket in self._buckets)
        if any(used) and bytes_of_all > self._cap:
            # A rank with more gradients than this one may wait in `_launch` for a reduction, and come here only after it. So
            # this rank must launch all of its buckets before it waits for the vote; otherwise both would wait for ever.
            for bucket in self._buckets:
                if not bucket.launched:
                    self._launch(bucket)
        votes = torch.tensor([*used, *late], dtype=torch.int32)
        dist.all_reduce(votes, group=self._votes)
        counts: list[int] = votes.tolist()
        return counts[: len(used)], counts[len(used) :]

    def _wait_for_all(self) -> None:
        while self._under_way:
            self._wait_for(self._under_way.popleft())

    def _sum_over_replicas(self, used_anywhere: set[nn.Parameter]) -> None:
        """Sums rows over the other axes, and gradients of parameters without dimensions over all ranks."""
        under_way = []
        for parameter in self._parameters:
            if parameter.dim() or parameter not in used_anywhere:
                continue
            # A parameter without dimensions has no rows, so each rank gets its whole gradient.
            whole = torch.zeros_like(parameter)
            if parameter.grad is not None:
                whole.copy_(parameter.grad)
            whole.div_(self._width)
            self._reduced[parameter] = whole
            under_way.append(dist.all_reduce(whole, group=self._all, async_op=True))
        # The outputs of whole buckets: fewer and larger collectives than one for each parameter.
        if self._replicas is not None:
            for output in self._outputs:
                under_way.append(dist.all_reduce(output, group=self._replicas, async_op=True))
        wait_all(under_way)

    def _set_gradient(self, parameter: Tensor) -> None:
        part = self._reduced[parameter]
        earlier = self._earlier.get(parameter)
        if earlier is not None:
            part.add_(local(earlier))
        parameter.grad = None
        parameter.grad = dtensor(part, self._mesh, parameter.shape)
