"""Which indices each rank reads at each step of one epoch, and what is known of each batch. Pure: nothing is read here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np

from paceline.data.augment import Indices
from paceline.plan.data import BatchInfo, DataPlan


class Schedule(Protocol):
    """The rest of one epoch, from the sample at which it was asked for."""

    steps: int

    def indices(self, step: int, index: int) -> list[Any]:
        """Indices that data index `index` loads at `step`; never empty."""
        ...

    def place(self, step: int, index: int) -> int:
        """Samples of the epoch before those of data index `index` at `step`."""
        ...

    def info(self, step: int) -> BatchInfo:
        """What this rank's batch at `step` is."""
        ...

    def consumed(self, step: int) -> int:
        """Global samples of the epoch that are used up after `step` steps."""
        ...

    def weight(self, step: int, count: int) -> int:
        """Sum of the weights, over all ranks, of `count` batches from `step` on; those after the end count nothing."""
        ...


class Even:
    """Global batches of equal size, cut out of an order of samples.

    Args:
        plan: sizes, width and what becomes of the tail.
        order: the whole epoch's indices.
        start: global samples of it that are used up already.
    """

    def __init__(self, plan: DataPlan, order: Sequence[Any] | np.ndarray, start: int = 0) -> None:
        self.plan = plan
        self.order = order
        self.start = start
        left = max(0, len(order) - start)
        self.steps = plan.steps(left)
        # Real samples of the last step. It is full, unless there are more steps than full global batches.
        self._tail = plan.global_batch
        if self.steps * plan.global_batch > left:
            self._tail = (left - 1) % plan.global_batch + 1
        self._shares = plan.rows(plan.global_batch)
        self._before = [0, *accumulate(self._shares)]
        # Two objects serve the whole epoch: a batch costs no allocation.
        self._full = plan.info(plan.global_batch, last=False)
        self._last = plan.info(self._tail, last=True)

    def indices(self, step: int, index: int) -> list[Any]:
        """Returns `micro_batch` consecutive indices; at the tail what `DataPlan.tail` says."""
        plan = self.plan
        first = self.start + step * plan.global_batch
        if self._is_full(step):
            indices = self._cut(first + self._before[index], first + self._before[index + 1])
        else:
            rows = plan.rows(self._tail)
            begin = first + sum(rows[:index])
            indices = self._cut(begin, begin + rows[index])
            if plan.tail == "pad":
                padding_before = max(0, self._before[index] - self._tail)  # rows of it that ranks before this one hold
                indices += self._wrapped(padding_before, self._shares[index] - rows[index])
        # A rank without a sample loads one that others hold, so that it can take part with weight zero.
        return indices or self._cut(first, first + 1)

    def place(self, step: int, index: int) -> int:
        before = self._before[index]
        if not self._is_full(step):
            before = sum(self.plan.rows(self._tail)[:index])
        return self.start + step * self.plan.global_batch + before

    def _is_full(self, step: int) -> bool:
        return step < self.steps - 1 or self._tail == self.plan.global_batch

    def info(self, step: int) -> BatchInfo:
        return self._full if step < self.steps - 1 else self._last

    def consumed(self, step: int) -> int:
        return min(self.start + step * self.plan.global_batch, max(self.start, len(self.order)))

    def weight(self, step: int, count: int) -> int:
        ahead = min(count, self.steps - step)
        if ahead <= 0:
            return 0
        return (ahead - 1) * self.plan.global_batch + sum(self.info(step + ahead - 1).weights)

    def _cut(self, begin: int, end: int) -> list[Any]:
        # A dataset may not accept numpy's integers as indices; `tolist` makes Python's.
        part = self.order[begin:end]
        return part.tolist() if isinstance(part, np.ndarray) else list(part)

    def _wrapped(self, begin: int, count: int) -> list[Any]:
        """`count` indices from the epoch's start on, which begins again where it ends."""
        indices = []
        for place in range(begin, begin + count):
            start = place % len(self.order)
            indices += self._cut(start, start + 1)
        return indices


class Whole:
    """Batches that a sampler of the user's has made; a few consecutive ones make a global batch.

    As many as there are ranks stay whole, one for each rank. Any other number (a sampler's batches that are global ones, a
    run that goes on at another width) is one run of indices, cut over the ranks as evenly as it goes.

    Args:
        plan: width and what becomes of a last group with fewer batches than ranks; its batch sizes are not used.
        batches: the whole epoch's batches, each a list of indices.
        start: global samples that are used up already.
        group: batches that make a global one.
    """

    def __init__(self, plan: DataPlan, batches: Sequence[Sequence[Any]], start: int = 0, group: int = 1) -> None:
        self.plan = plan
        self.batches = batches
        self._group = group
        self._is_cut = group != plan.width
        self._bounds = [0, *accumulate(len(batch) for batch in batches)]
        self._first = bisect_left(self._bounds, start)
        left = max(0, len(batches) - self._first)
        # A last group with fewer batches is a step, unless it is dropped.
        self.steps = -(-left // self._group)
        if plan.tail == "drop":
            self.steps = left // self._group

    def indices(self, step: int, index: int) -> list[Any]:
        """Returns one whole batch, or this rank's part of the batches of the step."""
        group = self._batches_of(step)
        if self._is_cut:
            rows = self._rows(group)
            begin = sum(rows[:index])
            indices = list(chain.from_iterable(group))
            # A rank without a row loads one that others hold, as in `Even`.
            return indices[begin : begin + max(1, rows[index])] or [group[0][0]]
        if index < len(group):
            return list(group[index])
        if self.plan.tail == "pad":
            return list(self.batches[(index - len(group)) % len(self.batches)])
        return [group[0][0]]

    def place(self, step: int, index: int) -> int:
        return self.consumed(step) + sum(self._rows(self._batches_of(step))[:index])

    def info(self, step: int) -> BatchInfo:
        group = self._batches_of(step)
        index = self.plan.index
        real = self._rows(group)
        weights = real
        if self.plan.tail == "pad" and not self._is_cut:
            # The ranks without a batch borrow from the epoch's start, as `indices` does.
            num_missing = self.plan.width - len(group)
            borrowed = [self.batches[place % len(self.batches)] for place in range(num_missing)]
            weights = real[: len(group)] + tuple(map(len, borrowed))
        return BatchInfo(index, real, weights, max(1, weights[index]), step == self.steps - 1)

    def consumed(self, step: int) -> int:
        return self._bounds[min(self._first + step * self._group, len(self.batches))]

    def weight(self, step: int, count: int) -> int:
        # Only a padded last group weighs more than it holds.
        end = min(step + count, self.steps)
        if end <= step:
            return 0
        last = self.info(end - 1)
        return self.consumed(end - 1) - self.consumed(step) + sum(last.weights)

    def _batches_of(self, step: int) -> Sequence[Sequence[Any]]:
        begin = self._first + step * self._group
        return self.batches[begin : begin + self._group]

    def _rows(self, group: Sequence[Sequence[Any]]) -> tuple[int, ...]:
        """Returns the number of real rows of each data index at a step with these batches."""
        width = self.plan.width
        if self._is_cut:
            share, extra = divmod(sum(len(batch) for batch in group), width)
            return tuple(share + (index < extra) for index in range(width))
        return tuple(len(batch) for batch in group) + (0,) * (width - len(group))


class RankBatches:
    """The batch sampler of the inner DataLoader: the indices of the data indices `indexes` in turn, step by step.

    Args:
        indexes: whose batches are read here: this rank's, or every rank's where one reads for all.
        scalar: each entry is one index and no list (a loader without automatic batching).
        with_places: each entry knows its place in the epoch, for workers.

    Attributes:
        key: seed of the epoch, for entries that know their place.
    """

    def __init__(self, indexes: Sequence[int], scalar: bool = False, with_places: bool = False) -> None:
        self.indexes = indexes
        self.scalar = scalar
        self.with_places = with_places
        self.key = 0
        self.schedule: Schedule | None = None

    def __iter__(self) -> Iterator[Any]:
        # Bound now, not at the first `next`: a loader with workers may keep drawing from it while a new epoch starts.
        return self._draw(self.schedule, self.key)

    def __len__(self) -> int:
        return self.schedule.steps * len(self.indexes) if self.schedule else 0

    def _draw(self, schedule: Schedule | None, key: int) -> Iterator[Any]:
        if schedule is None:
            return
        for step in range(schedule.steps):
            for index in self.indexes:
                indices = schedule.indices(step, index)
                if self.with_places:
                    yield Indices(indices, key, schedule.place(step, index))
                elif self.scalar:
                    yield indices[0]
                else:
                    yield indices
