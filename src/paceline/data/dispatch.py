"""One rank reads for all: rank 0 takes a batch for each rank in turn, and sends each rank its own.

    rank 0     read width batches -> [sizes] [counts, structure, tensors] to each rank, side by side -> own batch
    others     receive sizes, then the rest -> batch                   (or the error that reading raised on rank 0)

Nothing is concatenated or sliced, so that batches of any nesting and of unequal rows go as they are.
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
from paceline.data.feed import NOTHING, GlobalBatch, Mark, Steps, resized
from paceline.data.schedule import Schedule
from paceline.data.stream import StreamFeed, indivisible
from paceline.plan.data import DataPlan, Position
from paceline.world.collectives import Collectives
from paceline.world.mesh import cpu_group
from paceline.world.tree import Tree, map_leaves, map_tensors, tensors
from paceline.world.works import wait_all


class Channel:
    """Sends objects with tensors in them from rank 0 to each other rank of a group, over the CPU.

    Args:
        collectives: of the ranks that read different samples.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._group = cpu_group(collectives.group)
        self.size = collectives.size

    def send(self, messages: Sequence[Any]) -> None:
        """Sends `messages[i]` to rank i; the first is this rank's own and stays. Ranks: rank 0."""
        works = []
        buffers = []  # they must live until they have gone
        for rank, message in enumerate(messages[1:], 1):
            for buffer in _packed(message):
                buffers.append(buffer)
                works.append(dist.isend(buffer, group=self._group, group_dst=rank))
        wait_all(works)

    def receive(self) -> Any:
        """What rank 0 sent to this rank. Ranks: all but rank 0."""
        head = torch.empty(2, dtype=torch.int64)
        dist.recv(head, group=self._group, group_src=0)
        body = torch.empty(int(head.sum()), dtype=torch.uint8)
        dist.recv(body, group=self._group, group_src=0)
        return _unpacked(head, body)


class _TensorSpec:
    """Stands in a structure where a tensor of this kind belongs; no dataclass, which would be a container itself."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape


def _packed(message: Tree) -> tuple[Tensor, Tensor]:
    """Sizes, and one buffer: the pickled structure, then the bytes of each tensor."""
    structure = pickle.dumps(map_tensors(_TensorSpec, message))
    parts = [torch.frombuffer(bytearray(structure), dtype=torch.uint8)]
    for tensor in tensors(message):
        if tensor.numel():
            parts.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
    body = torch.cat(parts)
    return torch.tensor([len(structure), len(body) - len(structure)]), body


def _unpacked(head: Tensor, body: Tensor) -> Tree:
    structure_bytes = int(head[0])
    start = structure_bytes

    def fill(leaf: object) -> object:
        nonlocal start
        if not isinstance(leaf, _TensorSpec):
            return leaf
        end = start + leaf.shape.numel() * leaf.dtype.itemsize
        # Cloned, because a view of a wider type must begin at a multiple of its size.
        tensor = body[start:end].clone().view(leaf.dtype).view(leaf.shape)
        start = end
        return tensor

    return map_leaves(fill, pickle.loads(body[:structure_bytes].numpy().tobytes()))


@dataclass(frozen=True)
class _Failure:
    """An error that reading raised on rank 0."""

    error: Exception
    trace: str


def _failure(error: Exception) -> _Failure:
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign class raises when it is copied; its text goes in its place
        error = DataError(
            "data-dispatch",
            f"reading failed on rank 0, which reads for all ranks: {type(error).__name__}: {error}",
            why="the error itself cannot be sent to another process",
            fix="look at the traceback of rank 0",
        )
    return _Failure(error, trace)


class Reader(Protocol):
    """Reads the batches of every rank, on rank 0; elsewhere it only counts."""

    group: int

    def schedule(self, start: Position) -> Schedule | None:
        """What is known of the rest of an epoch. Ranks: all."""
        ...

    def global_batches(self, start: Position, note: Mapping[str, Any]) -> Iterator[GlobalBatch]:
        """The batches of all ranks, step by step. Ranks: 0."""
        ...

    def reseed(self, seed: int) -> None:
        """As in `Feed`."""
        ...

    def replan(self, global_batch: int, group: int) -> bool:
        """As in `Feed`."""
        ...

    def steps(self, epoch: int) -> int:
        """As in `Feed`."""
        ...

    def samples(self, epoch: int) -> int | None:
        """As in `Feed`."""
        ...

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """As in `Feed`."""
        ...


class DispatchFeed:
    """Batches that rank 0 reads for all ranks.

    Args:
        reader: reads the batches of every rank in turn; on the other ranks it only counts.
        plan: sizes, width and index.
        collectives: of the ranks that read different samples.

    Ranks:
        All of `collectives`, at each step.
    """

    def __init__(self, reader: Reader, plan: DataPlan, collectives: Collectives) -> None:
        self.plan = plan
        self._reader = reader
        self._channel = Channel(collectives)

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Reads and sends on rank 0, receives on the others; an error on rank 0 is raised on all."""
        if self.plan.index == 0:
            return self._lead(start, note)
        return self._follow(start)

    def _lead(self, start: Position, note: Mapping[str, Any]) -> Steps:
        schedule = self._reader.schedule(start)
        global_batches = self._reader.global_batches(start, note)
        for step in count():
            try:
                global_batch = next(global_batches, None)
                self._channel.send([global_batch and global_batch.part(index) for index in range(self.plan.width)])
            except Exception as error:
                failure = _failure(error)
                self._channel.send([failure] * self.plan.width)
                raise
            if global_batch is None:
                return
            info, consumed, batch = global_batch.part(0)
            yield batch, Mark(start.epoch, info, consumed, step, schedule, global_batch.note)
            if info.last:
                return

    def _follow(self, start: Position) -> Steps:
        schedule = self._reader.schedule(start)
        for step in count():
            received = self._channel.receive()
            if received is None:
                return
            if isinstance(received, _Failure):
                received.error.add_note(f"It was raised on rank 0, which reads for all ranks:\n{received.trace}")
                raise received.error
            info, consumed, batch = received
            yield batch, Mark(start.epoch, info, consumed, step, schedule, NOTHING)
            if info.last:
                return

    def reseed(self, seed: int) -> None:
        """As the reader does."""
        self._reader.reseed(seed)
        self.plan = replace(self.plan, seed=seed)

    @property
    def group(self) -> int:
        """As the reader has it."""
        return self._reader.group

    def replan(self, global_batch: int, group: int) -> bool:
        """As the reader does.

        Raises:
            DataError: `data-reshard`: of a stream, rank 0 reads equal batches.
        """
        width = self.plan.width
        if isinstance(self._reader, StreamFeed) and global_batch % width:
            raise indivisible(global_batch, width, "rank 0 reads an equal part for each rank")
        if not self._reader.replan(global_batch, group):
            return False
        self.plan = resized(self.plan, global_batch)
        return True

    def steps(self, epoch: int) -> int:
        """As the reader counts."""
        return self._reader.steps(epoch)

    def samples(self, epoch: int) -> int | None:
        """As the reader counts."""
        return self._reader.samples(epoch)

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """As the reader counts."""
        return self._reader.after(epoch, steps)
