"""Feeds: the sources of prepared loaders. A feed yields batches on the CPU, each with a mark of its place in the epoch.

MapFeed       every rank reads its own rows of an order that all ranks know
StreamFeed    every rank reads its part of a stream, and the ranks communicate at each step   (stream.py)
DispatchFeed  rank 0 reads for all ranks                                                      (dispatch.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from paceline.data.augment import Augmented, draws_nothing, has_own_streams
from paceline.data.divided_batches import DividedOrder
from paceline.data.entries import Entries
from paceline.data.order import Order, Shuffled, mix
from paceline.data.schedule import BatchSchedule, Even, RankBatches, WholeBatches
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.torch_internals.loaders import copy_with, has_iterator, naming_dead_workers


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
    schedule: BatchSchedule | None
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

    def reseed(self, seed: int, drawn: bool = False) -> None:
        """Changes the seed of the order of epochs, and whether the order is drawn instead (`DataPlan.drawn`)."""
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

    def state(self) -> Mapping[str, Any]:
        """Returns entries of `state_dict` that do not belong to a batch."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned where the position was saved."""
        ...


class Feed(BatchSource, Protocol):
    """The source of one rank's batches."""

    def open(self, start: Position, note: Mapping[str, Any]) -> Steps:
        """Yields the batches of the rest of an epoch; `note` is that of the last mark before `start`."""
        ...


def rewired(loader: DataLoader[Any], **fields: Any) -> DataLoader[Any]:
    """Returns a copy of `loader` with other fields; its workers, collation, pinning and class stay the same.

    It gives batches in order, even if `loader` does not (`in_order=False`): positions and weights count on the order.
    """
    if "in_order" in vars(loader):
        fields["in_order"] = True
    if loader.num_workers:
        from paceline.data.loader_worker import FirstCall

        # A loader that was rewired before has this function already.
        if not isinstance(loader.worker_init_fn, FirstCall):
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


class SeededWorkers:
    """What feeds around an inner DataLoader have in common: the seed of its workers is drawn when torch would draw it."""

    plan: DataPlan
    _loader: DataLoader[Any]  # the user's
    _inner: DataLoader[Any]
    _keeps_seed = False  # whether workers that were made before, maybe in an earlier run, keep their seed

    def _own_generators(self) -> list[torch.Generator]:
        """Returns the generators from which the loader draws besides the process's own streams."""
        raise NotImplementedError

    def _draws_for_rank_0(self, note: Mapping[str, Any]) -> bool:
        """Draws the seed of the workers that rank 0 draws, on a rank that does not read. Returns whether this is one."""
        if not self.plan.index or not self.plan.drawn or "order" in note:
            return False
        if not self._keeps_seed:
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        self._keeps_seed = self._inner.persistent_workers
        return True

    def state(self) -> Mapping[str, Any]:
        """Returns the states of these generators, and whether the seed of the workers is drawn already."""
        if not self.plan.drawn:
            return NOTHING
        keeps_seed = self._inner.persistent_workers and (self._keeps_seed or has_iterator(self._inner))
        generators = [generator.get_state() for generator in self._own_generators()]
        return {"drawn": 1, "streams_now": {"generators": generators, "keeps_seed": int(keeps_seed)}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state` returned where the position was saved."""
        self._keeps_seed = bool(state.get("keeps_seed"))
        for generator, saved in zip(self._own_generators(), state.get("generators", []), strict=False):
            generator.set_state(saved)


class MapFeed(SeededWorkers):
    """A feed (see `Feed`) of an indexed dataset.

    Args:
        loader: the user's loader. Its dataset, workers and collation are used, its samplers are read for the order alone.
        plan: how samples are divided.
        source: the indices of an epoch.
        everyone: whether the batches of all ranks are read in turn, on the rank that reads for all.
    """

    by_index = True  # whether each sample is read by its index, see `prepare.random_samples`

    def __init__(self, loader: DataLoader[Any], plan: DataPlan, source: Source, everyone: bool = False) -> None:
        self.plan = plan
        self.order = source.order
        self.group = 0
        if source.whole:
            self.group = 1 if source.split else plan.width
        self.dataset = loader.dataset
        self._loader = loader
        self._whole = source.whole
        self._generator = torch.Generator()
        self._indexes: Sequence[int] = (plan.index,)
        if everyone:
            self._indexes = range(plan.width)
        self._scalar = source.scalar
        self._build()

    def _build(self) -> None:
        """Builds the inner DataLoader."""
        loader = self._loader
        places = has_own_streams(self.plan) and not draws_nothing(loader.dataset)
        self._batches = RankBatches(self._indexes, self._scalar, with_places=places)
        # Without automatic batching, a DataLoader takes the entries of `sampler` as they are.
        sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
        fields: dict[str, Any] = {sampler: self._batches, "drop_last": False}
        if not self.plan.drawn:
            fields["generator"] = self._generator
        if places:
            fields["dataset"] = Augmented(loader.dataset, self._scalar)
        self._inner = rewired(loader, **fields)

    def schedule(self, start: Position, note: Mapping[str, Any] = NOTHING) -> BatchSchedule | None:
        """Returns what is known of the rest of an epoch before it is read, for ranks for which rank 0 reads.

        A rank that does not read draws from its own streams what rank 0 draws, as far as that is known.
        """
        schedule = self._rest(start, note)
        if self._draws_for_rank_0(note) and isinstance(self.order, Shuffled):
            torch.empty((), dtype=torch.int64).random_()
        return None if schedule.steps is None or self.group else schedule

    def _rest(self, start: Position, note: Mapping[str, Any]) -> BatchSchedule:
        """Returns the schedule of the rest of an epoch, from `start` on."""
        order = note.get("order") or NOTHING
        if self.group:
            parts = None
            if isinstance(self.order, DividedOrder):
                entries_of_batches = self.order.open(self.plan, start.epoch, self.plan.width, order)
                entries_of_batches.start_at(start.samples)
                entries: Entries = entries_of_batches
                parts = self.order.sampler.parts
            else:
                entries = self.order.open(self.plan, start.epoch, self.plan.width, order)
            return WholeBatches(self.plan, entries, start.samples, self.group, note.get("skipped"), parts)
        entries = self.order.open(self.plan, start.epoch, self.plan.global_batch, order)
        return Even(self.plan, entries, start.samples)

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Reads from the sample at `start` on; the samples before it are not read."""
        schedule = self._rest(start, note)
        return self._steps(start, schedule, self.read(start, schedule, note))

    def _steps(self, start: Position, schedule: BatchSchedule, batches: Iterator[Any]) -> Steps:
        for step, batch in enumerate(batches):
            schedule.settle(step)
            yield batch, Mark(start.epoch, schedule.info(step), schedule.consumed(step + 1), step, schedule, NOTHING)

    def global_batches(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Iterator[GlobalBatch]:
        """The batches of all ranks, step by step (where this feed reads for everyone)."""
        schedule = self._rest(start, note)
        return self._global_batches(schedule, self.read(start, schedule, note))

    def _global_batches(self, schedule: BatchSchedule, batches: Iterator[Any]) -> Iterator[GlobalBatch]:
        for step in count():
            # The inner loader yields the batches of all data indices of a step, one after the other.
            batches_of_step = list(islice(batches, self.plan.width))
            if not batches_of_step:
                return
            schedule.settle(step)
            info = schedule.info(step)
            # A rank with the weight 0 loads one row of filler.
            loaded = tuple(max(1, weight) for weight in info.weights)
            consumed = schedule.consumed(step + 1)
            resume = {"order": schedule.entries.note()} if self.plan.drawn else NOTHING
            yield GlobalBatch(batches_of_step, loaded, info.real, info.weights, info.last, consumed, resume)

    def read(self, start: Position, schedule: BatchSchedule, note: Mapping[str, Any] = NOTHING) -> Iterator[Any]:
        """Returns the inner DataLoader's iterator over the batches of a schedule."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(start.epoch)
        self._batches.schedule = schedule
        self._batches.key = mix(self.plan.seed, start.epoch)
        if not self.plan.drawn:
            # The workers' seeds are drawn from this generator and not from the global one: the order and all seeds are a pure
            # function of the loader's seed.
            self._generator.manual_seed(mix(self.plan.seed, start.epoch, self.plan.index, start.samples))
            return naming_dead_workers(iter(self._inner))
        drawn_before = "order" in note or self._keeps_seed
        self._keeps_seed = False
        with self._kept_streams() if drawn_before else nullcontext():
            return naming_dead_workers(iter(self._inner))

    @contextmanager
    def _kept_streams(self) -> Iterator[None]:
        """Gives the streams their states back: what is drawn inside has been drawn in the run that saved the position."""
        generator = self._loader.generator or torch.default_generator
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)

    # -- the state --------------------------------------------------------------------------------------------

    def _own_generators(self) -> list[torch.Generator]:
        own = list(getattr(self.order, "generators", ()))
        generator = self._loader.generator
        if generator is not None and not any(generator is other for other in own):
            own.append(generator)
        return own

    def reseed(self, seed: int, drawn: bool = False) -> None:
        was_drawn = self.plan.drawn
        self.plan = replace(self.plan, seed=seed, drawn=drawn)
        if was_drawn != drawn:
            self._build()

    def replan(self, global_batch: int, group: int) -> bool:
        """Changes the global batch; without automatic batching each rank reads one item at a step, so it cannot."""
        if self._scalar:
            return False
        self.plan = resized(self.plan, global_batch)
        self.group = group
        return True

    def steps(self, epoch: int) -> int:
        length = self.order.length()
        if length is None:
            raise TypeError("the loader's sampler has no length")
        if not self.group:
            return self.plan.steps(length)
        if self.plan.tail == "drop":
            return length // self.group
        return -(-length // self.group)

    def samples(self, epoch: int) -> int | None:
        # Only reading them shows how many samples the batches of a script's own sampler have.
        return None if self.group else self.order.length()

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        if self.group:  # the batches' sizes are not known before they are read
            return Position(epoch), {"skipped": steps * self.group}
        samples = steps * self.plan.global_batch
        length = self.order.length()
        return Position(epoch, samples if length is None else min(samples, length)), NOTHING
