"""`Transport`: how the tensors of one group travel. It has two forms, and `transport_of` chooses between them.

    NativeTransport     the backend's own collectives, such as NCCL's on GPUs
    PairwiseTransport   plain sends between every two ranks, for tensors that gloo carries

gloo's `reduce_scatter_tensor` and `all_gather_into_tensor` take two to three times as long as its all-reduce, which
moves twice the bytes. Sends between pairs move the least that is possible, without a copy: 25 MB over 2 / 4 ranks on one
machine, reduce-scatter 54 / 73 ms natively and 19 / 34 ms in pairs, all-gather 56 / 27 ms and 15 / 21 ms.

`transport_of` takes the pairwise form if gloo carries the tensors. The tests set `PACELINE_TRANSPORT=native` to run on
the CPU the code that a GPU runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base import env as environment
from paceline.world.mesh import backend_name
from paceline.world.works import PendingMessages, WorkHandle

_FIRST_TAG = 7061  # far from the small tags that a script may use for its own sends in the same group

# torch 2.13 gave these two functions the names that end in `single`, and warns of the older ones.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transport(ABC):
    """The collectives of one group that have more than one form.

    Args:
        group: the ranks that take part.

    Attributes:
        rank, size: the number of this process in the group, and how many there are.
        is_pairwise: whether plain sends take the place of the backend's collectives.

    Ranks:
        All ranks of the group call each method, in the same order as other collectives of the group. If the transport is
        pairwise, operations with different tags may start in another order on each rank.
    """

    is_pairwise: bool

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @abstractmethod
    def reduce_scatter(self, output: Tensor, input: Tensor, average: bool = False, tag: int = 0) -> WorkHandle:
        """Sums `input` over the ranks; rank i keeps the i-th of n equal parts.

        Args:
            output: this rank's part; not a view of `input`.
            input: read until `wait` has returned.
            average: divides the sum by n.
            tag: see the class.

        Shape:
            output: [k], input: [n * k], both contiguous; n is the number of ranks.
        """

    @abstractmethod
    def all_gather(self, output: Tensor, input: Tensor, tag: int = 0) -> WorkHandle:
        """Puts the `input` of every rank into `output`, in the order of ranks.

        Args:
            output: written until `wait` has returned.
            input: this rank's part; may be its own place in `output`.
            tag: see the class.

        Shape:
            output: [n * k], input: [k], both contiguous; n is the number of ranks.
        """

    @abstractmethod
    def reduce_parts(self, output: Tensor, parts: Sequence[Tensor], tag: int = 0) -> WorkHandle:
        """Sums the i-th part over the ranks, for rank i: a reduce-scatter of parts that need not be packed.

        Args:
            output: not a view of this rank's part.
            parts: contiguous; read until `wait` has returned.
            tag: see the class.

        Shape:
            parts: n tensors, each of any shape; output: the shape of this rank's part.
        """

    @abstractmethod
    def gather_parts(self, parts: Sequence[Tensor]) -> WorkHandle:
        """Fills the i-th part on every rank with the i-th part of rank i.

        Args:
            parts: contiguous; those of other ranks are written until `wait` has returned.

        Shape:
            parts: n tensors, each of any shape.
        """

    def collect_parts(self, parts: Sequence[Tensor], owner: int) -> WorkHandle:
        """Fills the i-th part on rank `owner` of the group with the i-th part of rank i.

        Args:
            parts: contiguous; ranks other than `owner` only read their own part.
            owner: the rank in the group that gets all parts.

        Shape:
            parts: n tensors, each of any shape.
        """
        # No backend can gather parts of unequal sizes, so this is made of sends.
        messages = _PairMessages(self, tag=0)
        if self.rank != owner:
            messages.send(parts[self.rank], owner)
            return messages
        for peer in messages.peers:
            messages.receive(parts[peer], peer)
        return messages


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Returns the transport for tensors on `device` in `group`."""
    wanted = environment.get("PACELINE_TRANSPORT")
    if wanted == "pairwise":
        return PairwiseTransport(group)
    if backend_name(group, device.type) != "gloo":
        return NativeTransport(group)
    # gloo's collectives take tensors of an accelerator too, and copy them to the host; its sends do not.
    if wanted == "native" or device.type != "cpu":
        return _NativeOverGloo(group)
    return PairwiseTransport(group)


class NativeTransport(Transport):
    """The collectives of the backend itself. They are matched by their order alone, and ignore tags."""

    is_pairwise = False

    def reduce_scatter(self, output: Tensor, input: Tensor, average: bool = False, tag: int = 0) -> WorkHandle:
        operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return _started(reduce_scatter_single(output, input, operation, group=self.group, async_op=True))

    def all_gather(self, output: Tensor, input: Tensor, tag: int = 0) -> WorkHandle:
        return _started(all_gather_single(output, input, group=self.group, async_op=True))

    def reduce_parts(self, output: Tensor, parts: Sequence[Tensor], tag: int = 0) -> WorkHandle:
        return _started(dist.reduce_scatter(output, list(parts), group=self.group, async_op=True))

    def gather_parts(self, parts: Sequence[Tensor]) -> WorkHandle:
        return _started(dist.all_gather(list(parts), parts[self.rank], group=self.group, async_op=True))


class _NativeOverGloo(NativeTransport):
    """gloo's own collectives where they work. Parts of unequal sizes would end the process, so these travel in pairs."""

    def reduce_parts(self, output: Tensor, parts: Sequence[Tensor], tag: int = 0) -> WorkHandle:
        if _are_equal(parts):
            return super().reduce_parts(output, parts, tag)
        return PairwiseTransport(self.group).reduce_parts(output, parts, tag)

    def gather_parts(self, parts: Sequence[Tensor]) -> WorkHandle:
        if _are_equal(parts):
            return super().gather_parts(parts)
        return PairwiseTransport(self.group).gather_parts(parts)


class PairwiseTransport(Transport):
    """Sends between every two ranks. Sums are added in the order of ranks, so that all ranks round in the same way."""

    is_pairwise = True

    @staticmethod
    def tagged(tag: int) -> int:
        """Returns the tag under which messages of this tag are sent."""
        return _FIRST_TAG + tag

    def reduce_scatter(self, output: Tensor, input: Tensor, average: bool = False, tag: int = 0) -> WorkHandle:
        return _PairwiseSum(self, output, input.view(self.size, -1).unbind(), average, tag)

    def all_gather(self, output: Tensor, input: Tensor, tag: int = 0) -> WorkHandle:
        parts = output.view(self.size, -1).unbind()
        own = parts[self.rank]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input.view(-1))
        return self._gather(parts, tag)

    def reduce_parts(self, output: Tensor, parts: Sequence[Tensor], tag: int = 0) -> WorkHandle:
        return _PairwiseSum(self, output, parts, False, tag)

    def gather_parts(self, parts: Sequence[Tensor]) -> WorkHandle:
        return self._gather(parts, tag=0)

    def _gather(self, parts: Sequence[Tensor], tag: int) -> WorkHandle:
        messages = _PairMessages(self, tag)
        for peer in messages.peers:
            messages.receive(parts[peer], peer)
        for peer in messages.peers:
            messages.send(parts[self.rank], peer)
        return messages


class _PairMessages(PendingMessages):
    """Messages to and from other ranks, which are all under way at the same time. An empty tensor sends no message."""

    def __init__(self, transport: Transport, tag: int) -> None:
        super().__init__()
        self._group = transport.group
        self._tag = _FIRST_TAG + tag
        # Each rank begins with the rank after it. If all began with rank 0, they would wait for each other there.
        rank, size = transport.rank, transport.size
        self.peers = [(rank + step) % size for step in range(1, size)]

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Begins to receive into `tensor`."""
        if tensor.numel():
            self.begin([dist.irecv(tensor, group=self._group, tag=self._tag, group_src=peer)])

    def send(self, tensor: Tensor, peer: int) -> None:
        """Begins to send `tensor`."""
        if tensor.numel():
            self.begin([dist.isend(tensor, group=self._group, tag=self._tag, group_dst=peer)])


class _PairwiseSum(_PairMessages):
    """A sum of parts that the other ranks send."""

    def __init__(self, transport: Transport, output: Tensor, parts: Sequence[Tensor], average: bool, tag: int) -> None:
        super().__init__(transport, tag)
        self._output = output
        self._divisor = transport.size if average else 1
        self._sent = parts  # the other ranks read this memory until `wait` returns, so it must not be freed before
        self._summands = list(parts)
        own = parts[transport.rank]
        for peer in self.peers:
            self._summands[peer] = torch.empty_like(own, memory_format=torch.contiguous_format)
            self.receive(self._summands[peer], peer)
        for peer in self.peers:
            self.send(parts[peer], peer)

    def wait(self) -> None:
        """Waits for the parts and adds them in the order of ranks, so that all ranks round in the same way."""
        super().wait()
        if not self._summands:
            return  # an earlier call has added them
        first, *others = self._summands
        self._sent = ()
        self._summands = []
        if not others:
            self._output.copy_(first.view_as(self._output))
        total = first.view_as(self._output)
        for part in others:
            # The first addition writes into the output, so that no copy is made before it.
            torch.add(total, part.view_as(self._output), out=self._output)
            total = self._output
        if self._divisor > 1:
            self._output.div_(self._divisor)


def _are_equal(parts: Sequence[Tensor]) -> bool:
    return len({part.shape for part in parts}) == 1


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "called by a rank outside of the group"
    return work
