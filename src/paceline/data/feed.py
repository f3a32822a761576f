"""What stands behind a prepared loader: a feed gives batches on the CPU, each with a mark of where it stands.

MapFeed       every rank reads its own rows of an order that all know
StreamFeed    every rank reads its part of a stream, and the ranks agree at each step   (stream.py)
DispatchFeed  one rank reads for all                                                    (dispatch.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.data.augment import Augmented
from paceline.data.loader_worker import FirstCall
from paceline.data.order import Order, mix
from paceline.data.schedule import Even, RankBatches, Schedule, Whole
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.torch_internals.loaders import copy_with, unrecorded


class Mark(NamedTuple):
    """Where a batch stands in its epoch.

    Attributes:
        epoch: number of the epoch.
        info: the batch's counts.
        consumed: global samples of the epoch that are used up with this batch.
        step: steps before it since the epoch was begun or resumed.
        schedule: what is known of the batches after it; None where nothing is.
        note: what else a resume right after this batch needs: entries of `state_dict`.
    """

    epoch: int
    info: BatchInfo
    consumed: int
    step: int
    schedule: Schedule | None
    note: Mapping[str, Any]


Steps = Iterator[tuple[Any, Mark]]
NOTHING: Mapping[str, Any] = {}


class GlobalBatch(NamedTuple):
    """The batches of all ranks at one step, where one rank reads them all.

    Attributes:
        batches: one for each data index.
        loaded: rows of each, filler included.
        real, weights, last: as in `BatchInfo`.
        consumed, note: as in `Mark`.
    """

    batches: list[Any]
    loaded: tuple[int, ...]
    real: tuple[int, ...]
    weights: tuple[int, ...]
    last: bool
    consumed: int
    note: Mapping[str, Any]

    def part(self, index: int) -> tuple[BatchInfo, int, Any]:
        """What one data index is told: its info, how much is consumed, its batch."""
        info = BatchInfo(index, self.real, self.weights, self.loaded[index], self.last)
        return info, self.consumed, self.batches[index]


class Feed(Protocol):
    """Batches of one rank."""

    plan: DataPlan

    def open(self, start: Position, note: Mapping[str, Any]) -> Steps:
        """Batches of the rest of an epoch; `note` is that of the mark which it resumes after."""
        ...

    def reseed(self, seed: int) -> None:
        """Orders epochs by another seed from now on."""
        ...

    @property
    def group(self) -> int:
        """Batches of the user's own sampler that make a global batch; 0 where batches are cut out of an order."""
        ...

    def replan(self, global_batch: int, group: int) -> bool:
        """Gives all ranks together as much at a step as another width did; False where it cannot.

        Raises:
            DataError: `data-reshard`.
        """
        ...

    def steps(self, epoch: int) -> int:
        """Steps of a full epoch; TypeError where nobody knows."""
        ...

    def samples(self, epoch: int) -> int | None:
        """Samples of a full epoch; None where nobody knows."""
        ...

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """The position after the first `steps` steps of an epoch, and its note."""
        ...


def rewired(loader: DataLoader[Any], **fields: Any) -> DataLoader[Any]:
    """A copy of `loader` with some fields changed; workers, collation, pinning and a subclass's ways stay its own."""
    if loader.num_workers and not isinstance(loader.worker_init_fn, FirstCall):
        fields["worker_init_fn"] = FirstCall(loader.worker_init_fn)
    return copy_with(loader, fields)


def resized(plan: DataPlan, global_batch: int) -> DataPlan:
    """The plan with another global batch."""
    return replace(plan, global_batch=global_batch, micro_batch=-(-global_batch // plan.width))


@dataclass(frozen=True)
class Source:
    """What an epoch of an indexed dataset is made of.

    Attributes:
        order: an epoch's indices, or (with `whole`) its batches of indices.
        whole: the order is one of batches that stay whole.
        split: whole batches are global ones, cut over the ranks.
        scalar: the dataset is given one index at a time, and no list (a loader without automatic batching).
    """

    order: Order
    whole: bool = False
    split: bool = False
    scalar: bool = False


class MapFeed:
    """Batches of a dataset that is indexed.

    Args:
        loader: the user's; its dataset, workers and collation are used, its samplers are not.
        plan: how samples are divided.
        source: what an epoch is made of.
        everyone: the batches of all ranks come in turn, for the rank that reads for all.
    """

    def __init__(self, loader: DataLoader[Any], plan: DataPlan, source: Source, everyone: bool = False) -> None:
        self.plan = plan
        self.order = source.order
        self.group = 0
        if source.whole:
            self.group = 1 if source.split else plan.width
        self.dataset = loader.dataset
        self._generator = torch.Generator()
        has_workers = loader.num_workers > 0
        indexes = range(plan.width) if everyone else (plan.index,)
        self._batches = RankBatches(indexes, source.scalar, with_places=has_workers)
        # Without automatic batching, a DataLoader takes the entries of `sampler` as they are.
        sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
        fields: dict[str, Any] = {sampler: self._batches, "generator": self._generator, "drop_last": False}
        if has_workers:
            fields["dataset"] = Augmented(loader.dataset, source.scalar)
        self._inner = rewired(loader, **fields)

    def schedule(self, start: Position) -> Schedule:
        """The rest of an epoch from `start` on."""
        order = self.order.draw(self.plan.seed, start.epoch)
        if self.group:
            return Whole(self.plan, order, start.samples, self.group)  # type: ignore[arg-type]
        return Even(self.plan, order, start.samples)

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Reads from the sample at `start` on; what came before is never touched."""
        schedule = self.schedule(start)
        for step, batch in enumerate(self.read(start, schedule)):
            yield batch, Mark(start.epoch, schedule.info(step), schedule.consumed(step + 1), step, schedule, NOTHING)

    def global_batches(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Iterator[GlobalBatch]:
        """The batches of all ranks, step by step (where this feed reads for everyone)."""
        schedule = self.schedule(start)
        batches = self.read(start, schedule)
        for step in range(schedule.steps):
            info = schedule.info(step)
            loaded = tuple(max(1, weight) for weight in info.weights)
            consumed = schedule.consumed(step + 1)
            batches_of_step = list(islice(batches, self.plan.width))
            yield GlobalBatch(batches_of_step, loaded, info.real, info.weights, info.last, consumed, NOTHING)

    def read(self, start: Position, schedule: Schedule) -> Iterator[Any]:
        """The inner DataLoader's iterator over the batches of a schedule."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(start.epoch)
        self._batches.schedule, self._batches.key = schedule, mix(self.plan.seed, start.epoch)
        # Workers' seeds are drawn from here, not from the global generator: a resumed run then draws the same dropout.
        self._generator.manual_seed(mix(self.plan.seed, start.epoch, self.plan.index, start.samples))
        return unrecorded(iter(self._inner))

    def reseed(self, seed: int) -> None:
        """Orders epochs by another seed from now on."""
        self.plan = replace(self.plan, seed=seed)

    def replan(self, global_batch: int, group: int) -> bool:
        """Any order can be cut anywhere; not where items come as they are, one for each rank."""
        if self._batches.scalar:
            return False
        self.plan, self.group = resized(self.plan, global_batch), group
        return True

    def steps(self, epoch: int) -> int:
        """Known without drawing the order, but for samplers that only drawing can count."""
        if self.group:
            return self.schedule(Position(epoch)).steps
        return self.plan.steps(self.order.length(self.plan.seed, epoch))

    def samples(self, epoch: int) -> int:
        """Length of the epoch's order, in samples."""
        if self.group:
            return sum(len(batch) for batch in self.order.draw(self.plan.seed, epoch))
        return self.order.length(self.plan.seed, epoch)

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """By arithmetic; nothing is read."""
        schedule = self.schedule(Position(epoch))
        return Position(epoch, schedule.consumed(min(steps, schedule.steps))), NOTHING
