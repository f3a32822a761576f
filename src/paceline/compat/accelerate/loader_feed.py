"""What stands behind accelerate's loaders: the order is drawn by the script's own samplers from the live random streams.

    open(epoch)    tell samplers the epoch -> synchronise generators -> iter(DataLoader), which draws the workers' seed
                   -> the batch sampler draws the order -> batches, one read ahead

So the draws are those of the DataLoader itself, at the same moments, and nothing else draws. An epoch that a checkpoint was
taken in is drawn again from the streams as they were at its beginning, which the position carries; those of the process do
not move meanwhile, so that a resumed run draws what the whole one did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.checkpoint.state import rng
from paceline.compat.accelerate.nested import concatenate, slice_tensors
from paceline.compat.accelerate.random_streams import synchronize_rng_states
from paceline.compat.accelerate.sample_order import Share, runs
from paceline.compat.accelerate.samplers import BatchSamplerShard, IterableDatasetShard, SamplerShard
from paceline.data.feed import NOTHING, GlobalBatch, Mark, Steps, rewired
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.world.tree import first_rows

_CPU = torch.device("cpu")


def _captured() -> dict[str, Any]:
    """States of this process's random streams, as tensors and plain values: a checkpoint of positions holds nothing else."""
    states = rng.capture(_CPU)
    words = states["numpy"]["state"]["key"]
    states["numpy"]["state"]["key"] = torch.from_numpy(words.astype(np.int64))
    return states


def _restore(states: Mapping[str, Any]) -> None:
    """Puts back what `_captured` gave."""
    numpy_state = states["numpy"]
    words = numpy_state["state"]["key"].numpy().astype(np.uint32)
    rng.restore({**states, "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": words}}}, _CPU)


class Part(NamedTuple):
    """A batch of this process.

    Attributes:
        batch: what the collation made.
        real, loaded: as in `Share`.
    """

    batch: Any
    real: tuple[int, ...]
    loaded: tuple[int, ...]


class _Replayed:
    """Random streams of an earlier moment, which a block draws from in the place of the process's own."""

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = states

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Everything inside draws from them; the process's own streams stay where they are."""
        own = _captured()
        _restore(self._states)
        try:
            yield
        finally:
            self._states = _captured()
            _restore(own)


class _Tapped:
    """The sampler of the inner DataLoader: passes on what this process loads, and tells the rows of each step.

    Args:
        sampler: gives lists of indices, or single ones.
        is_scalar: what is passed on is an entry of the sampler, and no list of them.

    Attributes:
        start: steps, and samples of all processes, that are left out.
        drawing: what the sampler draws inside of.
        steps: what was passed on, the oldest first.
        first: what was left out.
        idle: a step at which this process has nothing.
    """

    def __init__(self, sampler: Any, is_scalar: bool) -> None:
        self._sampler, self._is_scalar = sampler, is_scalar
        self.start: tuple[int, int] = (0, 0)
        self.drawing: Callable[[], AbstractContextManager[None]] = nullcontext
        self.steps: deque[Share] = deque()
        self.first: list[Share] = []
        self.idle: Share | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # Bound now: workers may be served from an iteration while the next one begins.
        self.steps, self.first, self.idle = deque(), [], None
        return self._draw(self._shares(), self.steps, self.first)

    def _shares(self) -> Iterator[Share]:
        if isinstance(self._sampler, BatchSamplerShard):
            return self._sampler.shares()
        return (_alone(entry, self._is_scalar) for entry in self._sampler)

    def _draw(self, shares: Iterator[Share], steps: deque[Share], first: list[Share]) -> Iterator[Any]:
        steps_before, samples_before = self.start
        step = samples = 0
        for share in shares if self.drawing is nullcontext else _inside(self.drawing, shares):
            step += 1
            samples += sum(share.real)
            if step <= steps_before or samples <= samples_before:
                first.append(share)
                continue
            if not share.indices:
                self.idle = share
                continue
            steps.append(share)
            yield share.indices[0] if self._is_scalar else list(share.indices)


def _inside(drawing: Callable[[], AbstractContextManager[None]], shares: Iterator[Share]) -> Iterator[Share]:
    """The same shares, each drawn inside of a context."""
    while True:
        with drawing():
            share = next(shares, None)
        if share is None:
            return
        yield share


def _alone(entry: Any, is_scalar: bool) -> Share:
    """What one process loads where it loads everything."""
    rows = (len(entry) if isinstance(entry, (list, tuple)) else 1,)
    return Share([entry] if is_scalar else entry, rows, rows)


class _Counted:
    """A collation that tells its rows, and how many of all processes are no filler; runs where the dataset is read."""

    def __init__(self, collate: Callable[[Any], Any], dataset: Any, is_batched: bool) -> None:
        self._collate, self._dataset, self._is_batched = collate, dataset, is_batched

    def __call__(self, samples: Any) -> Part:
        batch = self._collate(samples)
        rows = len(samples) if self._is_batched else first_rows(batch) or 1
        if not isinstance(self._dataset, IterableDatasetShard):
            return Part(batch, (rows,), (rows,))
        width = self._dataset.num_processes
        return Part(batch, runs(self._dataset.num_real, rows, width), (rows,) * width)


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
        rng_types: list[Any] | None = None,
        generator: torch.Generator | None = None,
        is_early: bool = False,
        num_first: int = 0,
    ) -> None:
        self.plan = plan
        self._num_first = num_first
        self.takes_part = False
        self.rng_types, self.generator = rng_types, generator
        self._loader = loader
        self._resumed: tuple[int, Mapping[str, Any]] | None = None
        self._tap: _Tapped | None = None
        self._unread: list[Any] = []  # batches of a stream that were left out
        if isinstance(loader.dataset, IterableDataset):
            is_batched = loader.batch_sampler is not None
            counted = _Counted(loader.collate_fn, loader.dataset, is_batched)
            self._inner = rewired(loader, collate_fn=counted)
        elif loader.batch_sampler is not None:
            self._tap = _Tapped(loader.batch_sampler, is_scalar=False)
            self._inner = rewired(loader, batch_sampler=self._tap)
        else:
            # A shard of batches stands here where the script has put a batch sampler in the sampler's place.
            is_scalar = not isinstance(loader.sampler, BatchSamplerShard) or isinstance(loader.sampler, SamplerShard)
            self._tap = _Tapped(loader.sampler, is_scalar)
            self._inner = rewired(loader, sampler=self._tap)
        self._early = iter(self._inner) if is_early else None

    # -- an epoch --------------------------------------------------------------------------------------------

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Batches from `start` on; the next one is read before a batch is given, so that the last one is known."""
        plan = self.plan
        step, samples = first_unread(start, note, plan.width)
        at_start: dict[str, Any] = {}
        parts = self.parts(start, step, samples, at_start)
        ahead = next(parts, None) or self._idle_part()
        consumed = start.samples
        info: BatchInfo | None = None
        while ahead is not None:
            batch, real, loaded = ahead
            before_next = torch.get_rng_state()
            ahead = next(parts, None) or self._idle_part()
            step += 1
            consumed += sum(real)
            if info is None or ahead is None or info.real != real or info.weights != loaded:
                info = BatchInfo(plan.index, real, loaded, loaded[plan.index] or 1, ahead is None)
            resume = {**at_start, "batches": step, "width": plan.width, "before_next": before_next}
            yield batch, Mark(start.epoch, info, consumed, step, None, resume)
            if ahead is None:
                ahead = self._idle_part()  # the loop may have begun to train with this very batch

    def _idle_part(self) -> Part | None:
        """A row with which a process that has nothing at the last step takes part in it; None where it does not."""
        tap = self._tap
        if tap is None or tap.idle is None or not self.takes_part:
            return None
        idle, tap.idle = tap.idle, None
        row = self._loader.collate_fn([self._loader.dataset[idle.spare]])
        return Part(row, idle.real, idle.loaded)

    def parts(self, start: Position, step: int, samples: int, at_start: dict[str, Any]) -> Iterator[Part]:
        """This process's batches after `step` steps, or after so many samples of all processes.

        Args:
            at_start: is given the states of all streams as they are before anything is drawn.
        """
        self.tell_epoch(start.epoch)
        resumed = self._resumed_at(start)
        early, self._early = self._early, None
        if self._loader.num_workers and (step or samples):
            early = None  # its workers were asked for the first batches already
        drawing: Callable[[], AbstractContextManager[None]] = nullcontext
        if resumed is not None:
            early = None
            for generator, state in zip(self.generators(), resumed["generators"], strict=False):
                generator.set_state(state)
            at_start.update({name: resumed[name] for name in ("streams", "generators", "is_early")})
            drawing = _Replayed(resumed["streams"]).drawing
        else:
            at_start["streams"] = _captured()
            at_start["is_early"] = early is not None
            at_start["generators"] = [generator.get_state() for generator in self.generators()]
        if self._tap is not None:
            self._tap.start, self._tap.drawing = (step, samples), drawing
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.generator)
        iterator = early
        if iterator is None:
            # The seed of an early iterator's workers was drawn before these streams were captured.
            is_apart = at_start["is_early"]
            with _Replayed(at_start["streams"]).drawing() if is_apart else drawing():
                iterator = iter(self._inner)
        if self._tap is None:
            yield from self._rest_of_stream(iterator, step, samples)
            return
        yield from self._tapped(iterator, self._tap, None if resumed is None else resumed.get("before_next"))

    def _tapped(self, iterator: Iterator[Any], tap: _Tapped, first_state: torch.Tensor | None) -> Iterator[Part]:
        steps = tap.steps
        own_state = torch.get_rng_state()
        if first_state is not None and self._loader.num_workers == 0:
            # What the dataset drew for this batch, it drew before the checkpoint was taken, since it was read ahead.
            torch.set_rng_state(first_state)
        for number, batch in enumerate(iterator):
            if number == 0 and first_state is not None and self._loader.num_workers == 0:
                torch.set_rng_state(own_state)
            share = steps.popleft()
            yield Part(batch, share.real, share.loaded)

    def _rest_of_stream(self, parts: Iterator[Part], step: int, samples: int) -> Iterator[Part]:
        """The parts after so many steps, or so many samples: a stream has to be read to get there."""
        self._unread = []
        consumed = 0
        for number, part in enumerate(parts, 1):
            consumed += sum(part.real)
            if number > step and consumed > samples:
                yield part
            elif len(self._unread) < self._num_first:
                self._unread.append(part.batch)

    def first_batches(self) -> list[Any]:
        """The epoch's first batches, where they were left out."""
        if self._tap is None:
            return self._unread
        shares = self._tap.first[: self._num_first]
        dataset, collate = self._loader.dataset, self._loader.collate_fn
        return [collate([dataset[index] for index in share.indices]) for share in shares]

    def tell_epoch(self, epoch: int) -> None:
        """Tells the samplers and the dataset which epoch begins, where they want to know."""
        for holder in self._holders():
            set_epoch = getattr(holder, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def _holders(self) -> list[Any]:
        """The sampler, its inner ones, and the dataset."""
        holders = []
        sampler: Any = self._loader.sampler if self._loader.batch_sampler is None else self._loader.batch_sampler
        while sampler is not None:
            holders.append(sampler)
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        return [*holders, self._loader.dataset]

    # -- the random streams ------------------------------------------------------------------------------------

    def generators(self) -> list[torch.Generator]:
        """All generators that an epoch draws from, each once."""
        holders = [self._loader, *self._holders(), getattr(self._loader.dataset, "dataset", None)]
        found = [getattr(holder, "generator", None) for holder in holders]
        unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
        return list(unique.values())

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
        resumed, self._resumed = self._resumed, None
        return resumed[1] if resumed is not None and resumed[0] == start.epoch else None

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
        dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
        return len(dataset) if hasattr(dataset, "__len__") else None

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """Counts full batches: nothing is read to look."""
        return Position(epoch, steps * self.plan.global_batch), {"batches": steps, "width": self.plan.width}


def first_unread(start: Position, note: Mapping[str, Any], width: int) -> tuple[int, int]:
    """Steps that are left out, where they were counted at this width; else samples, which count at every width."""
    if note.get("width") == width:
        return int(note["batches"]), 0
    return 0, start.samples


class DispatchReader:
    """Reads the batches of all processes on the first one, for `DispatchFeed`.

    A step's batches are joined and cut into equal runs; a short end is filled with the epoch's first rows.

    Args:
        feed: reads the loader's batches, one process's after the other.
        plan: sizes, width and index of this process.
        split_batches: a step is one batch of the loader, not one for each process.
        drop_last: leaves out a last step that has fewer batches.
        slice_fn: cuts a joined batch: (batch, slice, process_index=, num_processes=).
    """

    group = 0

    def __init__(
        self,
        feed: SamplerFeed,
        plan: DataPlan,
        split_batches: bool,
        drop_last: bool,
        slice_fn: Callable[..., Any] | None,
    ) -> None:
        self.feed, self.plan = feed, plan
        self._batches_per_step = 1 if split_batches else plan.width
        self._drop_last = drop_last
        self._slice = slice_fn or slice_tensors
        self._has_drawn = False
        self._is_resumed = False

    def draw_early(self) -> None:
        """Draws now what the first epoch draws where nothing is read, as a stateful loader does."""
        _draw_seed()
        self._has_drawn = True

    def schedule(self, start: Position) -> None:
        """Nothing is known of what follows. Where nothing is read, the seed of workers is drawn all the same."""
        if self.plan.index and not self._is_resumed and not self._has_drawn:
            _draw_seed()
        self._has_drawn = self._is_resumed = False

    def global_batches(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Iterator[GlobalBatch]:
        """What each process gets, step by step; one step is read ahead."""
        plan = self.plan
        step, samples = first_unread(start, note, plan.width)
        at_start: dict[str, Any] = {}
        parts = self.feed.parts(start, step * self._batches_per_step, samples, at_start)
        consumed = start.samples
        first: Any = None
        ahead = self._joined(parts)
        while ahead is not None:
            batch, num_real = ahead
            before_next = torch.get_rng_state()
            ahead = self._joined(parts)
            rows = -(-num_real // plan.width)
            if first is None:
                first = batch
            if rows * plan.width > num_real:
                left_out = self.feed.first_batches()
                first = concatenate(left_out) if left_out else first
                batch = self._filled(batch, first, rows * plan.width - num_real)
            batches = []
            for index in range(plan.width):
                run = slice(rows * index, rows * (index + 1))
                batches.append(self._slice(batch, run, process_index=index, num_processes=plan.width))
            loaded = (rows,) * plan.width
            step += 1
            consumed += num_real
            resume = {**at_start, "batches": step, "width": plan.width, "before_next": before_next}
            yield GlobalBatch(
                batches, loaded, runs(num_real, rows, plan.width), loaded, ahead is None, consumed, resume
            )

    def _joined(self, parts: Iterator[Part]) -> tuple[Any, int] | None:
        """The batches of a step as one, and its rows; None at the end."""
        group = list(islice(parts, self._batches_per_step))
        if not group or (self._drop_last and len(group) < self._batches_per_step):
            return None
        batches = [part.batch for part in group]
        joined = concatenate(batches) if len(batches) > 1 else batches[0]
        return joined, first_rows(joined) or sum(sum(part.real) for part in group)

    def _filled(self, batch: Any, first: Any, missing: int) -> Any:
        """The batch with the epoch's first rows behind it."""
        pieces = [batch]
        while missing > 0:
            rows = min(missing, first_rows(first) or missing)
            pieces.append(slice_tensors(first, slice(0, rows)))
            missing -= rows
        return concatenate(pieces)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """As the feed does; where nothing is read, nothing is drawn for the rest of an epoch either."""
        self._is_resumed = bool(state.get("under_way"))
        if epoch or self._is_resumed:
            self._has_drawn = False
        self.feed.resume(epoch, state)

    def reseed(self, seed: int) -> None:
        """As the feed does."""
        self.feed.reseed(seed)

    def replan(self, global_batch: int, group: int) -> bool:
        """A process's batch keeps the size that the script gives it."""
        return False

    def steps(self, epoch: int) -> int:
        """By the length of the loader that is read."""
        full, rest = divmod(self.feed.steps(epoch), self._batches_per_step)
        return full + (rest > 0 and not self._drop_last)

    def samples(self, epoch: int) -> int | None:
        """The dataset's length, where it has one."""
        return self.feed.samples(epoch)

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """Counts full batches: nothing is read to look."""
        return Position(epoch, steps * self.plan.global_batch), {"batches": steps, "width": self.plan.width}


def _draw_seed() -> None:
    """The draw with which a DataLoader's iterator begins."""
    torch.empty((), dtype=torch.int64).random_()
