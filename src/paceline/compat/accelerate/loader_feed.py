"""What stands behind accelerate's loaders: the order is drawn by the script's own samplers from the live random streams.

    open(epoch)    tell samplers the epoch -> synchronise generators -> iter(DataLoader), which draws the workers' seed
                   -> the batch sampler draws the order -> batches, one read ahead

So the draws are those of the DataLoader itself, at the same moments, and nothing else draws. An epoch that a checkpoint was
taken in is drawn again from the streams as they were at its beginning, which the position carries; those of the process do
not move meanwhile, so that a resumed run draws what the whole one did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.compat.accelerate.random_streams import synchronize_rng_states
from paceline.compat.accelerate.replayed_streams import ReplayedStreams, captured
from paceline.compat.accelerate.sample_order import Rows, runs
from paceline.compat.accelerate.samplers import BatchSamplerShard, IterableDatasetShard, SamplerShard
from paceline.compat.accelerate.tapped_sampler import TappedSampler
from paceline.data.feed import NOTHING, Mark, Steps, rewired
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.torch_internals.loaders import unrecorded
from paceline.world.tree import first_rows


class Part(NamedTuple):
    """A batch of this process, as the collation made it, and the rows of its step."""

    batch: Any
    rows: Rows


class _Counted:
    """A collation that tells its rows, and how many of all processes are no filler; runs where the dataset is read."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Any, is_batched: bool) -> None:
        self._collate = collate
        self._dataset = dataset
        self._is_batched = is_batched

    def __call__(self, samples: Any) -> Part:
        batch = self._collate(samples)
        # Without automatic batching the dataset itself gives batches, whose rows are seen in their tensors alone.
        count = len(samples) if self._is_batched else first_rows(batch) or 1
        if not isinstance(self._dataset, IterableDatasetShard):
            return Part(batch, Rows((count,), (count,)))
        width = self._dataset.num_processes
        return Part(batch, Rows(runs(self._dataset.num_real, count, width), (count,) * width))


class SamplerFeed:
    """Batches of one process.

    Args:
        loader: a DataLoader whose batch sampler, or dataset, gives this process's part.
        plan: sizes, width, index and seed.
        rng_types: streams that all processes have alike at the start of an epoch.
        generator: the one among them that is called "generator".
        is_early: the first iterator is made now, as a stateful loader does.
        num_first: how many of an epoch's first batches are remembered, where they are left out.

    Attributes:
        takes_part: whether a process that has nothing at the last step takes part in it, with a row of weight 0; else
            its epoch ends before. A loop that trains needs it: its backward pass waits for all.
    """

    group = 0

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
        self._unread: list[Any] = []  # batches of a stream that were left out
        if isinstance(loader.dataset, IterableDataset):
            is_batched = loader.batch_sampler is not None
            counted = _Counted(loader.collate_fn, loader.dataset, is_batched)
            self._inner = rewired(loader, collate_fn=counted)
        elif loader.batch_sampler is not None:
            self._tap = TappedSampler(loader.batch_sampler, is_scalar=False, num_first=num_first)
            self._inner = rewired(loader, batch_sampler=self._tap)
        else:
            # A shard of batches stands here where the script has put a batch sampler in the sampler's place.
            gives_batches = isinstance(loader.sampler, BatchSamplerShard) and not isinstance(
                loader.sampler, SamplerShard
            )
            self._tap = TappedSampler(loader.sampler, is_scalar=not gives_batches, num_first=num_first)
            self._inner = rewired(loader, sampler=self._tap)
        self._early = iter(self._inner) if is_early else None

    # -- an epoch --------------------------------------------------------------------------------------------

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Batches from `start` on; the next one is read before a batch is given, so that the last one is known."""
        plan = self.plan
        step, samples = first_unread(start, note, plan.width)
        at_start: dict[str, Any] = {"width": plan.width}
        parts = self.parts(start, step, samples, at_start)
        # In this process a dataset may draw random numbers for the batch that is read ahead; workers have streams of their own.
        reads_here = self._loader.num_workers == 0
        own_stream = torch.default_generator
        consumed = start.samples
        rows: Rows | None = None
        info: BatchInfo | None = None
        rows_of_step = 0
        ahead = next(parts, None) or self._idle_part()
        while ahead is not None:
            part = ahead
            if reads_here:
                at_start["before_next"] = own_stream.get_state()
            ahead = next(parts, None) or self._idle_part()
            step += 1
            if ahead is None or part.rows is not rows:
                rows = part.rows
                rows_of_step = sum(rows.real)
                info = BatchInfo(plan.index, rows.real, rows.loaded, rows.loaded[plan.index] or 1, ahead is None)
            consumed += rows_of_step
            at_start["batches"] = step
            yield part.batch, Mark(start.epoch, info, consumed, step, None, at_start.copy())
            if ahead is None:
                ahead = self._idle_part()  # the loop may have begun to train with this very batch

    def _idle_part(self) -> Part | None:
        """A row with which a process that has nothing at the last step takes part in it; None where it does not."""
        tap = self._tap
        if tap is None or tap.idle is None or not self.takes_part:
            return None
        idle = tap.idle
        tap.idle = None
        row = self._loader.collate_fn([self._loader.dataset[idle.spare]])
        return Part(row, idle.rows)

    def parts(self, start: Position, step: int, samples: int, at_start: dict[str, Any]) -> Iterator[Part]:
        """This process's batches after `step` steps, or after so many samples of all processes.

        Args:
            at_start: is given the states of all streams as they are before anything is drawn.
        """
        self.tell_epoch(start.epoch)
        resumed = self._resumed_at(start)
        early = self._early
        self._early = None
        if self._loader.num_workers and (step or samples):
            early = None  # its workers were asked for the first batches already
        drawing: Callable[[], AbstractContextManager[None]] | None = None
        if resumed is not None:
            early = None
            for generator, state in zip(self.generators(), resumed["generators"], strict=False):
                generator.set_state(state)
            for name in ("streams", "generators", "is_early"):
                at_start[name] = resumed[name]
            drawing = ReplayedStreams(resumed["streams"]).drawing
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
            # The seed of an early iterator's workers was drawn before these streams were captured.
            seeding = ReplayedStreams(at_start["streams"]).drawing if at_start["is_early"] else drawing
            with nullcontext() if seeding is None else seeding():
                iterator = iter(self._inner)
        if self._tap is None:
            return self._rest_of_stream(unrecorded(iterator), step, samples)
        before_first = None
        if resumed is not None and self._loader.num_workers == 0:
            before_first = resumed.get("before_next")
        return self._tapped(unrecorded(iterator), self._tap.rows, before_first)

    def _tapped(self, batches: Iterator[Any], rows: deque[Rows], before_first: torch.Tensor | None) -> Iterator[Part]:
        """The batches with their rows; the dataset draws for the first one from the stream `before_first`."""
        if before_first is not None:
            # What the dataset drew for this batch, it drew before the checkpoint was taken, since it was read ahead.
            own_state = torch.get_rng_state()
            torch.set_rng_state(before_first)
            first = next(batches, None)
            torch.set_rng_state(own_state)
            if not rows:
                return
            yield Part(first, rows.popleft())
        for batch in batches:
            yield Part(batch, rows.popleft())

    def _rest_of_stream(self, parts: Iterator[Part], step: int, samples: int) -> Iterator[Part]:
        """The parts after so many steps, or so many samples: a stream has to be read to get there."""
        self._unread = []
        consumed = 0
        for number, part in enumerate(parts, 1):
            consumed += sum(part.rows.real)
            if number > step and consumed > samples:
                yield part
            elif len(self._unread) < self._num_first:
                self._unread.append(part.batch)

    def first_batches(self) -> list[Any]:
        """The epoch's first batches, where they were left out."""
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
            set_epoch = getattr(holder, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def _holders(self) -> list[Any]:
        """The sampler, its inner ones, and the dataset."""
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
        """All generators that an epoch draws from, each once."""
        holders = [self._loader, *self._holders(), getattr(self._loader.dataset, "dataset", None)]
        generators: dict[int, torch.Generator] = {}
        for holder in holders:
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generators[id(generator)] = generator
        return list(generators.values())

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Draws this epoch from the streams of `state`, when it is opened next; or goes on with their generators."""
        self._resumed = None
        if "streams" in state:
            self._resumed = epoch, state
        if epoch or state.get("under_way"):
            self._early = None  # the saved run had used its own up
        for generator, saved in zip(self.generators(), state.get("generators_now", ()), strict=False):
            generator.set_state(saved)

    def _resumed_at(self, start: Position) -> Mapping[str, Any] | None:
        """The state that `resume` was given, where it is of this epoch; it serves once."""
        if self._resumed is None:
            return None
        epoch, state = self._resumed
        self._resumed = None
        return state if epoch == start.epoch else None

    def reseed(self, seed: int) -> None:
        """Gives a sampler that can be seeded this seed."""
        self.plan = replace(self.plan, seed=seed)
        for holder in self._holders():
            if hasattr(holder, "initial_seed"):
                holder.initial_seed = seed

    # -- counts ----------------------------------------------------------------------------------------------

    def replan(self, global_batch: int, group: int) -> bool:
        """A process's batch keeps the size that the script gives it."""
        return False

    def steps(self, epoch: int) -> int:
        """By the samplers' lengths, or the dataset's; TypeError where it has none."""
        return len(self._loader)

    def samples(self, epoch: int) -> int | None:
        """The dataset's length, where it has one."""
        dataset = self._loader.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = dataset.dataset
        return len(dataset) if hasattr(dataset, "__len__") else None

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """Counts full batches: nothing is read to look."""
        return Position(epoch, steps * self.plan.global_batch), {"batches": steps, "width": self.plan.width}


def first_unread(start: Position, note: Mapping[str, Any], width: int) -> tuple[int, int]:
    """Steps that are left out, where they were counted at this width; else samples, which count at every width."""
    if note.get("width") == width:
        return int(note["batches"]), 0
    return 0, start.samples
