"""`DispatchReader`: the first process reads the batches of all, under accelerate's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from paceline.data.feed import NOTHING, GlobalBatch
from paceline.plan.data import DataPlan, Position
from paceline.world.tree import first_rows
from paceline_accelerate.errors import CompatRuntimeError
from paceline_accelerate.loader_feed import FixedBatches, RankPart, SamplerFeed, draw_seed, first_unread
from paceline_accelerate.nested import concatenate, slice_tensors
from paceline_accelerate.sample_order import runs


class DispatchReader(FixedBatches):
    """Reads the batches of all processes on the first one, for `DispatchFeed`.

    A step's batches are joined and cut into equal runs; a short end is filled with the epoch's first rows.

    Args:
        feed: reads the loader's batches, one process's after the other.
        plan: sizes, width and index of this process.
        split_batches: a step is one batch of the loader, not one for each process.
        drop_last: leaves out a last step that has fewer batches.
        slice_fn: cuts a joined batch: (batch, slice, process_index=, num_processes=).
    """

    def __init__(
        self,
        feed: SamplerFeed,
        plan: DataPlan,
        split_batches: bool,
        drop_last: bool,
        slice_fn: Callable[..., Any] | None,
    ) -> None:
        self.feed = feed
        self.plan = plan
        self._batches_per_step = 1 if split_batches else plan.width
        self._drop_last = drop_last
        self._slice = slice_fn or slice_tensors
        self._has_drawn = False
        self._has_begun = False  # whether an epoch has begun in this process
        self._is_resumed = False

    def draw_early(self) -> None:
        """Draws the workers' seed of the first epoch now, on a rank that reads nothing, as a stateful loader does."""
        draw_seed()
        self._has_drawn = True

    def schedule(self, start: Position, note: Mapping[str, Any] = NOTHING) -> None:
        """Begins an epoch on a rank that may read nothing; the order of samples is not known in advance."""
        # The first process draws a seed when it makes its iterator. The others draw one here, so that every process has drawn
        # equally often. Persistent workers keep their iterator and its seed.
        keeps_seed = self._has_begun and self.feed.keeps_workers
        if self.plan.index and not (self._is_resumed or self._has_drawn or keeps_seed):
            draw_seed()
        self._has_begun = True
        self._has_drawn = self._is_resumed = False

    def global_batches(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Iterator[GlobalBatch]:
        """Yields what each process gets, step by step; one step is read ahead so that the last one is known."""
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
            rows = math.ceil(num_real / plan.width)
            if first is None:
                first = batch
            missing = rows * plan.width - num_real
            if missing:
                # The filler is the epoch's first rows. In a resumed epoch these were skipped, and have to be read now.
                left_out = self.feed.first_batches()
                if left_out:
                    first = concatenate(left_out)
                batch = self._filled(batch, first, missing)
            batches = []
            for index in range(plan.width):
                run = slice(rows * index, rows * (index + 1))
                batches.append(self._slice(batch, run, process_index=index, num_processes=plan.width))
            loaded = (rows,) * plan.width
            real = runs(num_real, rows, plan.width)
            step += 1
            consumed += num_real
            resume = {**at_start, "batches": step, "width": plan.width, "before_next": before_next}
            yield GlobalBatch(batches, loaded, real, loaded, ahead is None, consumed, resume)

    def _joined(self, parts: Iterator[RankPart]) -> tuple[Any, int] | None:
        """Reads and joins the batches of a step; returns the result and its number of rows, or None at the end."""
        group = list(islice(parts, self._batches_per_step))
        is_short = len(group) < self._batches_per_step
        if not group or (is_short and self._drop_last):
            return None
        batches = [part.batch for part in group]
        joined = _concatenated(batches) if len(batches) > 1 else batches[0]
        num_rows = first_rows(joined)
        if not num_rows:  # no tensor has rows: the samplers know how many there are
            num_rows = sum(sum(part.rows.real) for part in group)
        return joined, num_rows

    def _filled(self, batch: object, first: Any, missing: int) -> Any:
        """Appends the epoch's first rows to a batch, more than once if they are too few."""
        pieces = [batch]
        while missing > 0:
            rows = min(missing, first_rows(first) or missing)
            pieces.append(slice_tensors(first, slice(0, rows)))
            missing -= rows
        return concatenate(pieces)

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Resumes the feed; a rank that reads nothing draws no seed for the rest of a resumed epoch."""
        self._is_resumed = bool(state.get("under_way"))
        if epoch or self._is_resumed:
            self._has_drawn = False
        self.feed.resume(epoch, state)

    def reseed(self, seed: int, drawn: bool = False) -> None:
        """Sets the seed of the feed's samplers."""
        self.feed.reseed(seed)

    def steps(self, epoch: int) -> int:
        """Returns the number of steps of an epoch, by the length of the loader that is read."""
        full, rest = divmod(self.feed.steps(epoch), self._batches_per_step)
        return full + (rest > 0 and not self._drop_last)

    def samples(self, epoch: int) -> int | None:
        """Returns the length of the dataset, or None where it has none."""
        return self.feed.samples(epoch)


def _concatenated(batches: list[Any]) -> Any:
    """Joins the batches of a step.

    Raises:
        CompatRuntimeError: `compat-argument`, if tensors differ in other dims than their rows.
    """
    try:
        return concatenate(batches)
    except RuntimeError as error:
        raise CompatRuntimeError(
            "compat-argument",
            "the batches of a step cannot be joined.",
            why="dispatch_batches=True, which is the default for an IterableDataset, joins one batch for each process "
            f"before it divides them, and these differ in another dim than their rows: {error}",
            fix="pad all batches to one length (`padding='max_length'`), or use dispatch_batches=False, or split_batches=True",
        ) from error
