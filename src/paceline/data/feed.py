"""Feeds: the sources of prepared loaders. A feed yields batches on the CPU, each with a mark of its place in the epoch.

MapFeed       every rank reads its own rows of an order that all ranks know
StreamFeed    every rank reads its part of a stream, and the ranks communicate at each step   (stream.py)
DispatchFeed  rank 0 reads for all ranks                                                      (dispatch.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """The place of a batch in its epoch.

    Attributes:
        epoch: the number of the epoch.
        info: the counts of the batch.
        consumed: the number of samples of the epoch, over all ranks, up to and including this batch.
        step: the number of steps before it since the epoch was begun or resumed.
        schedule: what is known of the batches after it, or None.
        note: further entries of `state_dict` that a resume after this batch needs.
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
    """The batches of all ranks at one step, if one rank reads all of them.

    Attributes:
        batches: one for each data index.
        loaded: the number of rows of each, including filler.
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
        """Returns the part of one data index: its counts, the number of consumed samples, and its batch."""
        info = BatchInfo(index, self.real, self.weights, self.loaded[index], self.last)
        return info, self.consumed, self.batches[index]


class BatchSource(Protocol):
    """The order of a loader's batches, and how many there are."""

    plan: DataPlan

    def reseed(self, seed: int) -> None:
        """Changes the seed of the order of epochs."""
        ...

    @property
    def group(self) -> int:
        """The number of batches of the user's own sampler in a global batch; 0 if batches are cut out of an order."""
        ...

    def replan(self, global_batch: int, group: int) -> bool:
        """Changes the global batch to that of a run with another number of ranks. Returns False if it cannot.

        Raises:
            DataError: `data-reshard`.
        """
        ...

    def steps(self, epoch: int) -> int:
        """Returns the number of steps of a full epoch. Raises TypeError if it is not known."""
        ...

    def samples(self, epoch: int) -> int | None:
        """Returns the number of samples of a full epoch; None if it is not known."""
        ...

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """Returns the position after the first `steps` steps of an epoch, and its note."""
        ...


class Feed(BatchSource, Protocol):
    """The source of one rank's batches."""

    def open(self, start: Position, note: Mapping[str, Any]) -> Steps:
        """Yields the batches of the rest of an epoch; `note` is that of the last mark before `start`."""
        ...


def rewired(loader: DataLoader[Any], **fields: Any) -> DataLoader[Any]:
    """Returns a copy of `loader` with other fields; its workers, collation, pinning and class stay the same."""
    # A loader that was rewired before has this function already.
    if loader.num_workers and not isinstance(loader.worker_init_fn, FirstCall):
        fields["worker_init_fn"] = FirstCall(loader.worker_init_fn)
    return copy_with(loader, fields)


def resized(plan: DataPlan, global_batch: int) -> DataPlan:
    """Returns the plan with another global batch."""
    return replace(plan, global_batch=global_batch, micro_batch=-(-global_batch // plan.width))


@dataclass(frozen=True)
class Source:
    """The indices of an epoch of an indexed dataset.

    Attributes:
        order: the indices, or (with `whole`) batches of indices.
        whole: whether it is an order of batches, which are not regrouped.
        split: whether these batches are global ones, which are divided over the ranks.
        scalar: whether the dataset gets one index at a time and no list (a loader without automatic batching).
    """

    order: Order
    whole: bool = False
    split: bool = False
    scalar: bool = False


class MapFeed:
    """A feed (see `Feed`) of an indexed dataset.

    Args:
        loader: the user's loader. Its dataset, workers and collation are used, its samplers are not.
        plan: how samples are divided.
        source: the indices of an epoch.
        everyone: whether the batches of all ranks are read in turn, on the rank that reads for all.
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
        indexes: Sequence[int] = (plan.index,)
        if everyone:
            indexes = range(plan.width)
        self._batches = RankBatches(indexes, source.scalar, with_places=has_workers)
        # Without automatic batching, a DataLoader takes the entries of `sampler` as they are.
        sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
        fields: dict[str, Any] = {sampler: self._batches, "generator": self._generator, "drop_last": False}
        if has_workers:
            fields["dataset"] = Augmented(loader.dataset, source.scalar)
        self._inner = rewired(loader, **fields)

    def schedule(self, start: Position) -> Schedule:
        """Returns the schedule of the rest of an epoch, from `start` on."""
        order = self.order.draw(self.plan.seed, start.epoch)
        if self.group:
            return Whole(self.plan, order, start.samples, self.group)  # type: ignore[arg-type]
        return Even(self.plan, order, start.samples)

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Reads from the sample at `start` on; the samples before it are not read."""
        schedule = self.schedule(start)
        for step, batch in enumerate(self.read(start, schedule)):
            yield batch, Mark(start.epoch, schedule.info(step), schedule.consumed(step + 1), step, schedule, NOTHING)

    def global_batches(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Iterator[GlobalBatch]:
        """The batches of all ranks, step by step (where this feed reads for everyone)."""
        schedule = self.schedule(start)
        batches = self.read(start, schedule)
        for step in range(schedule.steps):
            info = schedule.info(step)
            # A rank with the weight 0 loads one row of filler.
            loaded = tuple(max(1, weight) for weight in info.weights)
            consumed = schedule.consumed(step + 1)
            # The inner loader yields the batches of all data indices of a step, one after the other.
            batches_of_step = list(islice(batches, self.plan.width))
            yield GlobalBatch(batches_of_step, loaded, info.real, info.weights, info.last, consumed, NOTHING)

    def read(self, start: Position, schedule: Schedule) -> Iterator[Any]:
        """Returns the inner DataLoader's iterator over the batches of a schedule."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(start.epoch)
        self._batches.schedule = schedule
        self._batches.key = mix(self.plan.seed, start.epoch)
        # The workers' seeds are drawn from this generator and not from the global one. Otherwise a run that resumes in the
        # middle of an epoch would draw other dropout masks than a run that was not interrupted.
        self._generator.manual_seed(mix(self.plan.seed, start.epoch, self.plan.index, start.samples))
        return unrecorded(iter(self._inner))

    def reseed(self, seed: int) -> None:
        self.plan = replace(self.plan, seed=seed)

    def replan(self, global_batch: int, group: int) -> bool:
        """Changes the global batch; without automatic batching each rank reads one item at a step, so it cannot."""
        if self._batches.scalar:
            return False
        self.plan = resized(self.plan, global_batch)
        self.group = group
        return True

    def steps(self, epoch: int) -> int:
        if self.group:  # only drawing the order shows how many batches the user's own sampler gives
            return self.schedule(Position(epoch)).steps
        return self.plan.steps(self.order.length(self.plan.seed, epoch))

    def samples(self, epoch: int) -> int:
        if self.group:
            return sum(len(batch) for batch in self.order.draw(self.plan.seed, epoch))
        return self.order.length(self.plan.seed, epoch)

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        schedule = self.schedule(Position(epoch))
        return Position(epoch, schedule.consumed(min(steps, schedule.steps))), NOTHING
