"""`dispatch`: rank 0 reads a batch for each rank, and sends each rank its own.

    rank 0     read width batches -> [sizes] [counts, structure, tensors] to each rank, all at once -> own batch
    others     receive sizes, then the rest -> batch                   (or the error that reading raised on rank 0)

Batches are sent as they are, and not concatenated or sliced, so that they may have any nesting and different numbers of rows.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import DataError
from paceline.data.feed import NOTHING, BatchSource, GlobalBatch, Mark, Steps, resized
from paceline.data.schedule import BatchSchedule
from paceline.data.stream import StreamFeed, indivisible
from paceline.plan.data import DataPlan, Position
from paceline.world.collectives import Collectives
from paceline.world.mesh import cpu_group
from paceline.world.tree import Tree, map_leaves, map_tensors, tensors
from paceline.world.works import wait_all


class Channel:
    """Sends nested structures of objects and tensors from rank 0 to the other ranks of a group, over the CPU.

    Args:
        collectives: of the ranks that read different samples.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._group = cpu_group(collectives.group)
        self.size = collectives.size

    def send(self, messages: Sequence[Any]) -> None:
        """Sends `messages[i]` to rank i; the first one, which is for this rank, is not sent. Ranks: 0."""
        works = []
        buffers = []  # a buffer must live until it is sent
        for rank, message in enumerate(messages[1:], 1):
            for buffer in _packed(message):
                buffers.append(buffer)
                works.append(dist.isend(buffer, group=self._group, group_dst=rank))
        wait_all(works)

    def receive(self) -> Any:
        """Receives the message of rank 0. Ranks: all but 0."""
        head = torch.empty(2, dtype=torch.int64)
        dist.recv(head, group=self._group, group_src=0)
        body = torch.empty(int(head.sum()), dtype=torch.uint8)
        dist.recv(body, group=self._group, group_src=0)
        return _unpacked(head, body)


class _TensorSpec:
    """Takes the place of a tensor in a structure. It is no dataclass, since `world.tree` takes those for containers."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self.shape = tensor.shape


def _packed(message: Tree) -> tuple[Tensor, Tensor]:
    """Returns two sizes, and one buffer with the pickled structure and then the bytes of each tensor."""
    structure = pickle.dumps(map_tensors(_TensorSpec, message))
    parts = [torch.frombuffer(bytearray(structure), dtype=torch.uint8)]
    for tensor in tensors(message):
        # An empty tensor has a spec and no bytes.
        if tensor.numel():
            parts.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
    body = torch.cat(parts)
    return torch.tensor([len(structure), len(body) - len(structure)]), body


def _unpacked(head: Tensor, body: Tensor) -> Tree:
    """Returns the message that `_packed` has made into these two tensors."""
    structure_bytes = int(head[0])
    start = structure_bytes

    def fill(leaf: object) -> object:
        # Leaves come in the order in which `_packed` wrote their bytes.
        nonlocal start
        if not isinstance(leaf, _TensorSpec):
            return leaf
        end = start + leaf.shape.numel() * leaf.dtype.itemsize
        # The bytes are copied, because a view of a wider dtype must begin at a multiple of its item size.
        tensor = body[start:end].clone().view(leaf.dtype).view(leaf.shape)
        start = end
        return tensor

    return map_leaves(fill, pickle.loads(body[:structure_bytes].numpy().tobytes()))


@dataclass(frozen=True)
class _ReadingFailure:
    """An error that reading raised on rank 0."""

    error: Exception
    trace: str


def _failure(error: Exception) -> _ReadingFailure:
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error class of the user's may raise anything when it is pickled; its text is sent instead
        error = DataError(
            "data-dispatch",
            f"reading failed on rank 0, which reads for all ranks: {type(error).__name__}: {error}",
            why="the error itself cannot be sent to another process",
            fix="look at the traceback of rank 0",
        )
    return _ReadingFailure(error, trace)


class Reader(BatchSource, Protocol):
    """A source that can read the batches of all ranks. Rank 0 does so; on the other ranks it only counts."""

    def schedule(self, start: Position, note: Mapping[str, Any] = NOTHING) -> BatchSchedule | None:
        """Returns what is known of the rest of an epoch. Ranks: all."""
        ...

    def global_batches(self, start: Position, note: Mapping[str, Any]) -> Iterator[GlobalBatch]:
        """Yields the batches of all ranks, step by step. Ranks: 0."""
        ...


class DispatchFeed:
    """A feed (see `Feed`) of batches that rank 0 reads for all ranks.

    Args:
        reader: reads the batches of every rank in turn; on the other ranks it only counts.
        plan: sizes, width and index.
        collectives: of the ranks that read different samples.

    Ranks: all of `collectives`, at each step.
    """

    by_index = True  # if its dataset has indices

    def __init__(self, reader: Reader, plan: DataPlan, collectives: Collectives) -> None:
        self.plan = plan
        self._reader = reader
        self._channel = Channel(collectives)

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Reads and sends on rank 0, receives on the others; an error on rank 0 is raised on all ranks."""
        schedule = self._reader.schedule(start, note)
        if self.plan.index == 0:
            return self._lead(start, schedule, self._reader.global_batches(start, note))
        return self._follow(start, schedule)

    def _lead(self, start: Position, schedule: BatchSchedule | None, global_batches: Iterator[GlobalBatch]) -> Steps:
        for step in count():
            try:
                global_batch = next(global_batches, None)
                # None tells the other ranks that no batch is left.
                messages: list[Any] = [None] * self.plan.width
                if global_batch is not None:
                    messages = [global_batch.part(index) for index in range(self.plan.width)]
                self._channel.send(messages)
            except Exception as error:
                # The other ranks wait for a batch. They get the error in its place, and raise it too.
                failure = _failure(error)
                self._channel.send([failure] * self.plan.width)
                raise
            if global_batch is None:
                return
            info, consumed, batch = global_batch.part(0)
            yield batch, Mark(start.epoch, info, consumed, step, schedule, global_batch.note)
            if info.last:
                return

    def _follow(self, start: Position, schedule: BatchSchedule | None) -> Steps:
        for step in count():
            received = self._channel.receive()
            if received is None:
                return
            if isinstance(received, _ReadingFailure):
                received.error.add_note(f"It was raised on rank 0, which reads for all ranks:\n{received.trace}")
                raise received.error
            info, consumed, batch = received
            yield batch, Mark(start.epoch, info, consumed, step, schedule, NOTHING)
            if info.last:
                return

    def reseed(self, seed: int, drawn: bool = False) -> None:
        self._reader.reseed(seed, drawn)
        self.plan = replace(self.plan, seed=seed, drawn=drawn)

    def state(self) -> Mapping[str, Any]:
        return self._reader.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._reader.load(state)

    @property
    def group(self) -> int:
        return self._reader.group

    def replan(self, global_batch: int, group: int) -> bool:
        """Changes the global batch, see `Feed`.

        Raises:
            DataError: `data-reshard`, for a stream, of which rank 0 can only read batches of equal size.
        """
        width = self.plan.width
        if isinstance(self._reader, StreamFeed) and global_batch % width:
            raise indivisible(global_batch, width, "rank 0 reads an equal part for each rank")
        if not self._reader.replan(global_batch, group):
            return False
        self.plan = resized(self.plan, global_batch)
        return True

    def steps(self, epoch: int) -> int:
        return self._reader.steps(epoch)

    def samples(self, epoch: int) -> int | None:
        return self._reader.samples(epoch)

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        return self._reader.after(epoch, steps)
