"""The feed behind accelerate's loaders: the script's own samplers draw the order from the process's random generators.

    open(epoch)    tell samplers the epoch -> synchronise generators -> iter(DataLoader), which draws the workers' seed
                   -> the batch sampler draws the order -> batches, one read ahead

The random numbers are therefore those that the DataLoader itself would draw, at the same moments, and nothing else draws.
When a run is resumed in the middle of an epoch, the epoch's order is drawn again from the states that the random streams had
at its beginning; the saved position carries them. The streams of the process do not move while this is done, so that a
resumed run draws the same numbers as a run that was never interrupted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.feed import NOTHING, Mark, Steps, rewired
from paceline.data.stream import Part as StreamPart
from paceline.data.stream import StreamFeed
from paceline.data.streams import PrivateStreams, captured
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.torch_internals.loaders import naming_dead_workers
from paceline.world.collectives import Collectives
from paceline.world.tree import first_rows
from paceline_accelerate.random_streams import synchronize_rng_states
from paceline_accelerate.sample_order import RowsOfRank, runs
from paceline_accelerate.samplers import BatchSamplerShard, IterableDatasetShard, SamplerShard, set_epoch_of
from paceline_accelerate.tapped_sampler import TappedSampler


class RankPart(NamedTuple):
    """A batch of this process, as `collate_fn` returned it, and the number of rows that each process has at this step."""

    batch: Any
    rows: RowsOfRank


class _CountedBatches:
    """A `collate_fn` that also returns the rows of each process, and how many of them are real samples.

    It runs where the dataset is read, which is in a worker process where the loader has workers.
    """

    def __init__(self, collate: Callable[[Any], Any], dataset: Any, is_batched: bool) -> None:
        self._collate = collate
        self._dataset = dataset
        self._is_batched = is_batched

    def __call__(self, samples: Any) -> RankPart:
        batch = self._collate(samples)
        if self._is_batched:
            count = len(samples)
        else:
            # Without automatic batching the dataset itself yields batches: only their tensors show how many rows they have.
            count = first_rows(batch) or 1
        if not isinstance(self._dataset, IterableDatasetShard):
            return RankPart(batch, RowsOfRank((count,), (count,)))
        width = self._dataset.num_processes
        return RankPart(batch, RowsOfRank(runs(self._dataset.num_real, count, width), (count,) * width))


class FixedBatches:
    """What every feed of accelerate's loaders answers alike: its batches have the sizes that the script chose.

    Attributes:
        plan: batch sizes, number of processes, index of this process, and seed.
    """

    group = 0
    plan: DataPlan

    def replan(self, global_batch: int, group: int) -> bool:
        """Refuses a new size of the global batch: under accelerate a process's batch has the size that the script chose."""
        return False

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """Returns the position after `steps` steps, which counts full batches: nothing is read to see whether one is short."""
        return Position(epoch, steps * self.plan.global_batch), {"batches": steps, "width": self.plan.width}

    def state(self) -> Mapping[str, Any]:
        """Returns nothing: accelerate's loaders save the streams themselves."""
        return NOTHING

    def load(self, state: Mapping[str, Any]) -> None:
        """Does nothing, see `state`."""


class SamplerFeed(FixedBatches):
    """Reads the batches of one process from a DataLoader.

    Args:
        loader: a DataLoader whose batch sampler, or dataset, yields this process's part.
        plan: batch sizes, number of processes, index of this process, and seed.
        rng_types: names of the random streams that are synchronized over the processes at the start of an epoch.
        generator: the stream among them that is called "generator".
        is_early: whether the first iterator is made now, as torchdata's `StatefulDataLoader` does.
        num_first: how many of an epoch's first batches `first_batches` can return after they were skipped.

    Attributes:
        takes_part: whether a process that has no batch at the last step takes part in it with a row of weight 0. If not,
            its epoch ends one step earlier, as it does where gradients are off. A training loop needs the row, because its
            backward pass waits for all ranks.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: DataPlan,
        rng_types: Sequence[Any] | None = None,
        generator: torch.Generator | None = None,
        is_early: bool = False,
        num_first: int = 0,
    ) -> None:
        self.plan = plan
        self._num_first = num_first
        self.takes_part = False
        self.rng_types = rng_types
        self.generator = generator
        self._loader = loader
        self._resumed: tuple[int, Mapping[str, Any]] | None = None
        self._tap: TappedSampler | None = None
        self._unread: list[Any] = []  # batches of an iterable dataset that were read only to be skipped
        if isinstance(loader.dataset, IterableDataset):
            is_batched = loader.batch_sampler is not None
            counted = _CountedBatches(loader.collate_fn, loader.dataset, is_batched)
            self._inner = rewired(loader, collate_fn=counted)
        elif loader.batch_sampler is not None:
            self._tap = TappedSampler(loader.batch_sampler, is_scalar=False, num_first=num_first)
            self._inner = rewired(loader, batch_sampler=self._tap)
        else:
            # A script may pass a batch sampler as `sampler=` with `batch_size=None`; its shard then yields lists of indices.
            # `SamplerShard` is a subclass of `BatchSamplerShard` that yields single indices.
            is_shard = isinstance(loader.sampler, BatchSamplerShard)
            gives_batches = is_shard and not isinstance(loader.sampler, SamplerShard)
            self._tap = TappedSampler(loader.sampler, is_scalar=not gives_batches, num_first=num_first)
            self._inner = rewired(loader, sampler=self._tap)
        self._early = None
        if is_early:
            self._early = iter(self._inner)

    @property
    def keeps_workers(self) -> bool:
        """Whether the workers of one epoch also read the next one."""
        return self._loader.persistent_workers

    # -- an epoch --------------------------------------------------------------------------------------------

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Yields the batches from `start` on.

        The next batch is read before the current one is yielded, because `Mark.info` says whether the current one is the last.
        """
        plan = self.plan
        step, samples = first_unread(start, note, plan.width)
        at_start: dict[str, Any] = {"width": plan.width}
        parts = self.parts(start, step, samples, at_start)
        # Without workers the dataset draws its random numbers (augmentation, for example) from this process's stream, also
        # for the batch that is read ahead. A checkpoint needs the state from before that read. Workers have their own streams.
        reads_here = self._loader.num_workers == 0
        own_stream = torch.default_generator
        consumed = start.samples
        rows: RowsOfRank | None = None
        info: BatchInfo | None = None
        rows_of_step = 0
        ahead = next(parts, None) or self._idle_part()
        while ahead is not None:
            part = ahead
            if reads_here:
                at_start["before_next"] = own_stream.get_state()
            ahead = next(parts, None) or self._idle_part()
            step += 1
            # Steps of equal rows share one `RowsOfRank`, and so one `BatchInfo` serves all of them; only the last differs.
            if info is None or ahead is None or part.rows is not rows:
                rows = part.rows
                rows_of_step = sum(rows.real)
                info = BatchInfo(plan.index, rows.real, rows.loaded, rows.loaded[plan.index] or 1, ahead is None)
            consumed += rows_of_step
            at_start["batches"] = step
            yield part.batch, Mark(start.epoch, info, consumed, step, None, at_start.copy())
            if ahead is None:
                ahead = self._idle_part()  # the loop may have begun to train with this very batch

    def _idle_part(self) -> RankPart | None:
        """Reads one row for a process that has no batch at the last step; returns None where no such row is needed."""
        tap = self._tap
        if tap is None or tap.idle is None or not (self.takes_part and torch.is_grad_enabled()):
            return None
        # The row is given once an epoch: without this reset, `open` would go on with idle steps for ever.
        idle = tap.idle
        tap.idle = None
        row = self._loader.collate_fn([self._loader.dataset[idle.spare]])
        return RankPart(row, idle.rows)

    def parts(self, start: Position, step: int, samples: int, at_start: dict[str, Any]) -> Iterator[RankPart]:
        """Yields this process's batches after `step` steps, or after `samples` samples of all processes together.

        Args:
            start: position whose epoch is read.
            step: number of steps to skip.
            samples: number of samples to skip, where the steps were counted at another number of processes.
            at_start: receives the states that all random streams have before anything is drawn.
        """
        self.tell_epoch(start.epoch)
        resumed = self._resumed_at(start)
        early = self._early
        self._early = None
        if self._loader.num_workers and (step or samples):
            early = None  # its workers were already asked for the epoch's first batches, which are skipped here
        drawing: Callable[[], AbstractContextManager[None]] | None = None
        if resumed is not None:
            early = None
            # Not strict: this script may have another number of generators than the one that was saved.
            for generator, state in zip(self.generators(), resumed["generators"], strict=False):
                generator.set_state(state)
            for name in ("streams", "generators", "is_early"):
                at_start[name] = resumed[name]
            drawing = PrivateStreams(resumed["streams"]).drawing
        else:
            at_start["streams"] = captured()
            at_start["is_early"] = early is not None
            at_start["generators"] = [generator.get_state() for generator in self.generators()]
        if self._tap is not None:
            self._tap.start = (step, samples)
            self._tap.drawing = drawing
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.generator)
        iterator = early
        if iterator is None:
            seeding = drawing
            if at_start["is_early"]:
                # The seed of an early iterator's workers was drawn before these streams were captured.
                seeding = PrivateStreams(at_start["streams"]).drawing
            with nullcontext() if seeding is None else seeding():
                iterator = iter(self._inner)
        if self._tap is None:
            return self._rest_of_stream(naming_dead_workers(iterator), step, samples)
        before_first = None
        if resumed is not None and self._loader.num_workers == 0:
            before_first = resumed.get("before_next")
        return self._tapped(naming_dead_workers(iterator), self._tap.rows, before_first)

    def _tapped(
        self, batches: Iterator[Any], rows: deque[RowsOfRank], before_first: torch.Tensor | None
    ) -> Iterator[RankPart]:
        """Yields the batches with their rows; for the first one the dataset draws from the state `before_first`."""
        if before_first is not None:
            # The saved run had read this batch ahead, so the dataset drew its random numbers before the checkpoint was taken.
            # They are drawn again from that earlier state, and the process's stream is left as the checkpoint has it.
            own_state = torch.get_rng_state()
            torch.set_rng_state(before_first)
            first = next(batches, None)
            torch.set_rng_state(own_state)
            if not rows:
                return
            yield RankPart(first, rows.popleft())
        for batch in batches:
            yield RankPart(batch, rows.popleft())

    def _rest_of_stream(self, parts: Iterator[RankPart], step: int, samples: int) -> Iterator[RankPart]:
        """Yields the parts after `step` steps or `samples` samples; an iterable dataset can only be read through to there."""
        self._unread = []
        consumed = 0
        for number, part in enumerate(parts, 1):
            consumed += sum(part.rows.real)
            # One of the two limits is 0 (`first_unread`).
            if number > step and consumed > samples:
                yield part
            elif len(self._unread) < self._num_first:
                self._unread.append(part.batch)

    def first_batches(self) -> list[Any]:
        """Returns the epoch's first batches where they were skipped, at most `num_first` of them."""
        if self._tap is None:
            return self._unread
        batches = []
        for indices in self._tap.left_out:
            samples = [self._loader.dataset[index] for index in indices]
            batches.append(self._loader.collate_fn(samples))
        return batches

    def tell_epoch(self, epoch: int) -> None:
        """Tells the samplers and the dataset which epoch begins, where they want to know."""
        for holder in self._holders():
            set_epoch_of(holder, epoch)

    def _holders(self) -> list[Any]:
        """Lists the sampler, the samplers inside it, and the dataset."""
        holders = []
        sampler: Any = self._loader.batch_sampler
        if sampler is None:
            sampler = self._loader.sampler
        while sampler is not None:
            holders.append(sampler)
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        return [*holders, self._loader.dataset]

    # -- the random streams ------------------------------------------------------------------------------------

    def generators(self) -> list[torch.Generator]:
        """Lists the generators that an epoch draws from, each of them once."""
        # An `IterableDatasetShard` holds the script's dataset, whose generator it seeds, under `dataset`.
        holders = [self._loader, *self._holders(), getattr(self._loader.dataset, "dataset", None)]
        generators: dict[int, torch.Generator] = {}
        for holder in holders:
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generators[id(generator)] = generator
        return list(generators.values())

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Takes over a saved position: when `epoch` is opened next, its order is drawn from the streams in `state`.

        A state without streams was saved between two epochs; its generators simply go on.
        """
        self._resumed = None
        if "streams" in state:
            self._resumed = epoch, state
        if epoch or state.get("under_way"):
            self._early = None  # the saved run had used up its early iterator
        for generator, saved in zip(self.generators(), state.get("generators_now", ()), strict=False):
            generator.set_state(saved)

    def _resumed_at(self, start: Position) -> Mapping[str, Any] | None:
        """Returns the state that was given to `resume` if it belongs to this epoch, and forgets it."""
        if self._resumed is None:
            return None
        epoch, state = self._resumed
        self._resumed = None
        if epoch != start.epoch:
            return None
        return state

    def reseed(self, seed: int, drawn: bool = False) -> None:
        """Sets the seed of the samplers that have an `initial_seed`."""
        self.plan = replace(self.plan, seed=seed)
        for holder in self._holders():
            if hasattr(holder, "initial_seed"):
                holder.initial_seed = seed

    # -- counts ----------------------------------------------------------------------------------------------

    def steps(self, epoch: int) -> int:
        """Returns the number of steps of an epoch, by the lengths of the samplers or the dataset.

        Raises:
            TypeError: the dataset has no length.
        """
        return len(self._loader)

    def samples(self, epoch: int) -> int | None:
        """Returns the length of the dataset, or None where it has none."""
        dataset = self._loader.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = dataset.dataset
        if not hasattr(dataset, "__len__"):
            return None
        return len(dataset)


class OwnShardsFeed(StreamFeed):
    """Reads a dataset that divides itself, and draws as many random numbers as the DataLoader over each process's part would.

    Args:
        loader, plan, collectives: as for `StreamFeed`.
        is_early: whether the first iterator is made now, as torchdata's `StatefulDataLoader` does.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: DataPlan, collectives: Collectives | None, is_early: bool = False
    ) -> None:
        super().__init__(loader, plan, collectives)
        # Whether the next epoch needs no new iterator, or has one whose seed was drawn before.
        self._has_drawn = is_early
        if is_early:
            draw_seed()

    def parts(self, start: Position, note: Mapping[str, Any]) -> Iterator[StreamPart]:
        """Yields this process's batches after it has drawn the seed of the workers, which `StreamFeed` has of its own."""
        if not self._has_drawn:
            draw_seed()
        # Persistent workers keep their iterator, and so its seed, in all later epochs.
        self._has_drawn = self._loader.persistent_workers
        yield from super().parts(start, note)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Takes over a saved position: the rest of an epoch has the seed that was drawn before the checkpoint."""
        self._has_drawn = bool(state.get("under_way"))


def draw_seed() -> None:
    """Draws the random number that a DataLoader's iterator draws when it is made."""
    torch.empty((), dtype=torch.int64).random_()


def first_unread(start: Position, note: Mapping[str, Any], width: int) -> tuple[int, int]:
    """Returns how many steps and how many samples are skipped; one of the two is 0.

    A number of steps counts only with as many processes as it was saved with. Samples count at any number of processes.
    """
    if note.get("width") == width:
        return int(note["batches"]), 0
    return 0, start.samples
