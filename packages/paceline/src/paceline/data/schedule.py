"""Which indices each rank reads at each step of one epoch, and what is known of each batch. No sample is loaded here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, count
from typing import Any, Protocol

from paceline.data.augment import Indices
from paceline.data.entries import Entries
from paceline.plan.data import BatchInfo, DataPlan


class BatchSchedule(Protocol):
    """The rest of one epoch, from the sample at which it was asked for.

    Attributes:
        steps: the number of steps; None if it is not known before all entries are read.
        entries: what the batches are made of.
    """

    entries: Entries

    @property
    def steps(self) -> int | None: ...

    def has(self, step: int) -> bool:
        """Returns whether there is a step of this number. May read the entries of that step."""
        ...

    def indices(self, step: int, index: int) -> list[Any] | None:
        """Indices that data index `index` loads at `step`, at least one; None after the last step.

        Those of earlier steps are forgotten.
        """
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

    def settle(self, step: int) -> None:
        """Says that a resume will begin at `step` or later."""
        ...


class Even:
    """Global batches of equal size, cut out of an order of samples.

    Args:
        plan: sizes, width and what becomes of the tail.
        entries: the whole epoch's indices, of which the first `plan.global_batch` are kept.
        start: global samples of it that are used up already.
    """

    def __init__(self, plan: DataPlan, entries: Entries, start: int = 0) -> None:
        self.plan = plan
        self.entries = entries
        self.start = start
        self._shares = plan.rows(plan.global_batch)
        self._before = [0, *accumulate(self._shares)]
        # One object serves all batches of an epoch but the last: a batch costs no allocation.
        self._full = plan.info(plan.global_batch, last=False)

    @property
    def steps(self) -> int | None:
        length = self.entries.length
        return None if length is None else self.plan.steps(max(0, length - self.start))

    def has(self, step: int) -> bool:
        num_real = self._num_real(step)
        return num_real == self.plan.global_batch or (num_real > 0 and self.plan.tail != "drop")

    def indices(self, step: int, index: int) -> list[Any] | None:
        """Returns `micro_batch` consecutive indices; at the tail what `DataPlan.tail` says."""
        plan = self.plan
        first = self.start + step * plan.global_batch
        num_real = self._num_real(step)
        self.entries.forget(first)
        if num_real == plan.global_batch:
            indices = self.entries.cut(first + self._before[index], first + self._before[index + 1])
        elif num_real <= 0 or plan.tail == "drop":
            return None
        else:
            rows = plan.rows(num_real)
            begin = first + sum(rows[:index])
            indices = self.entries.cut(begin, begin + rows[index])
            if plan.tail == "pad":
                padding_before = max(0, self._before[index] - num_real)  # rows of it that ranks before this one hold
                indices += self._wrapped(padding_before, self._shares[index] - rows[index])
        # A rank without a sample loads one that others hold, so that it can take part with weight zero.
        return indices or self.entries.cut(first, first + 1)

    def place(self, step: int, index: int) -> int:
        num_real = self._num_real(step)
        before = self._before[index]
        if num_real < self.plan.global_batch:
            before = sum(self.plan.rows(num_real)[:index])
        return self.start + step * self.plan.global_batch + before

    def info(self, step: int) -> BatchInfo:
        length = self.entries.length
        if length is not None and length >= self.start + (step + 2) * self.plan.global_batch:
            return self._full  # nearly always: the batch after it is full, too
        num_real = self._num_real(step)
        steps = self.steps
        if steps is None and num_real == self.plan.global_batch:
            return self.plan.info(num_real, last=lambda: not self.has(step + 1))
        return self.plan.info(num_real, last=steps is None or step == steps - 1)

    def consumed(self, step: int) -> int:
        return max(self.start, self.entries.size(self.start + step * self.plan.global_batch))

    def weight(self, step: int, count: int) -> int:
        first = self.start + step * self.plan.global_batch
        num_real = self.entries.size(first + count * self.plan.global_batch) - first
        if num_real <= 0:
            return 0
        num_full, rest = divmod(num_real, self.plan.global_batch)
        weight = num_full * self.plan.global_batch
        if rest and self.plan.tail != "drop":
            weight += sum(self.plan.info(rest, last=True).weights)
        return weight

    def settle(self, step: int) -> None:
        self.entries.settle(self.start + step * self.plan.global_batch)

    def _num_real(self, step: int) -> int:
        """Returns the number of samples in a global batch; it is not above 0 after the end."""
        first = self.start + step * self.plan.global_batch
        return self.entries.size(first + self.plan.global_batch) - first

    def _wrapped(self, begin: int, count: int) -> list[Any]:
        """`count` indices from the epoch's start on, which begins again where it ends."""
        length = self.entries.length
        if length is None:
            length = self.entries.size(self.plan.global_batch)
        indices = []
        for place in range(begin, begin + count):
            start = place % length
            indices += self.entries.cut(start, start + 1)
        return indices


class WholeBatches:
    """Batches that a sampler of the user's has made; a few consecutive ones make a global batch.

    As many as there are ranks stay whole, one for each rank. Any other number (a sampler's batches that are global ones, a
    run that goes on at another width) is one run of indices, cut over the ranks as evenly as it goes. Batches of a sampler that
    divides them itself are always cut: as many as there are ranks then have no larger parts than if they had stayed whole.

    Args:
        plan: width and what becomes of a last group with fewer batches than ranks; its batch sizes are not used.
        entries: the whole epoch's batches, each a list of indices, of which the first `plan.width` are kept.
        start: global samples that are used up already.
        group: batches that make a global one.
        first: the number of batches that are left out, where it is known and `start` is not.
        parts: says how many samples of a global batch each rank gets, where the sampler divides its batches itself.
    """

    def __init__(
        self,
        plan: DataPlan,
        entries: Entries,
        start: int = 0,
        group: int = 1,
        first: int | None = None,
        parts: Callable[[Sequence[int], int], tuple[int, ...]] | None = None,
    ) -> None:
        self.plan = plan
        self.entries = entries
        self._group = group
        self._parts_of = parts
        self._parts: dict[int, tuple[int, ...]] = {}  # rows of each data index by step, where `parts` says them
        self._is_cut = group != plan.width or parts is not None
        self._bounds = [0]  # samples before each batch, as far as they were read
        self._start = start
        self._begin = first

    @property
    def steps(self) -> int | None:
        if self.entries.length is None:
            return None
        left = max(0, self.entries.length - self._first)
        # A last group with fewer batches is a step, unless it is dropped.
        if self.plan.tail == "drop":
            return left // self._group
        return -(-left // self._group)

    def has(self, step: int) -> bool:
        num_batches = len(self._sizes(step))
        return num_batches == self._group or (num_batches > 0 and self.plan.tail != "drop")

    def indices(self, step: int, index: int) -> list[Any] | None:
        """Returns one whole batch, or this rank's part of the batches of the step."""
        begin = self._first + step * self._group
        sizes = self._sizes(step)
        self.entries.forget(begin)
        if not sizes or (len(sizes) < self._group and self.plan.tail == "drop"):
            return None
        if self._is_cut:
            rows = self._rows(step)
            before = sum(rows[:index])
            indices = list(chain.from_iterable(self.entries.cut(begin, begin + len(sizes))))
            # A rank without a row loads one that others hold, as in `Even`.
            return indices[before : before + max(1, rows[index])] or [indices[0]]
        if index < len(sizes):
            (batch,) = self.entries.cut(begin + index, begin + index + 1)
            return list(batch)
        if self.plan.tail == "pad":
            place = (index - len(sizes)) % (begin + len(sizes))
            (batch,) = self.entries.cut(place, place + 1)
            return list(batch)
        (batch,) = self.entries.cut(begin, begin + 1)
        return [batch[0]]

    def place(self, step: int, index: int) -> int:
        return self.consumed(step) + sum(self._rows(step)[:index])

    def info(self, step: int) -> BatchInfo:
        sizes = self._sizes(step)
        index = self.plan.index
        real = self._rows(step)
        weights = real
        if self.plan.tail == "pad" and not self._is_cut:
            # The ranks without a batch borrow from the epoch's start, as `indices` does.
            num_missing = self.plan.width - len(sizes)
            num_batches = self._first + step * self._group + len(sizes)
            borrowed = [self._size(place % num_batches) for place in range(num_missing)]
            weights = real[: len(sizes)] + tuple(borrowed)
        steps = self.steps
        ends: bool | Callable[[], bool] = step + 1 == steps
        if steps is None:
            ends = len(sizes) < self._group or (lambda: not self.has(step + 1))
        return BatchInfo(index, real, weights, max(1, weights[index]), ends)

    def consumed(self, step: int) -> int:
        num_batches = self._first + step * self._group
        self._grow(num_batches)
        return self._bounds[min(num_batches, len(self._bounds) - 1)]

    def weight(self, step: int, count: int) -> int:
        # Only a padded last group weighs more than it holds.
        end = step
        while end < step + count and self.has(end):
            end += 1
        if end == step:
            return 0
        last = self.info(end - 1)
        return self.consumed(end - 1) - self.consumed(step) + sum(last.weights)

    def settle(self, step: int) -> None:
        self.entries.settle(self._first + step * self._group)
        self._parts = {later: parts for later, parts in self._parts.items() if later >= step}

    @property
    def _first(self) -> int:
        """The number of batches before the start."""
        if self._begin is None:
            # Read only now, after the iterator of the loader was created.
            while self._bounds[-1] < self._start and self._grow(len(self._bounds)):
                pass
            self._begin = bisect_left(self._bounds, self._start)
        return self._begin

    def _grow(self, count: int) -> bool:
        """Reads the sizes of the first `count` batches. Returns False if there are not so many."""
        while len(self._bounds) <= count:
            batches = self.entries.cut(len(self._bounds) - 1, len(self._bounds))
            if not batches:
                return False
            self._bounds.append(self._bounds[-1] + len(batches[0]))
        return True

    def _size(self, place: int) -> int:
        return self._bounds[place + 1] - self._bounds[place]

    def _sizes(self, step: int) -> list[int]:
        """Returns the sizes of the batches of a step."""
        begin = self._first + step * self._group
        self._grow(begin + self._group)
        end = min(begin + self._group, len(self._bounds) - 1)
        return [self._size(place) for place in range(begin, end)]

    def _rows(self, step: int) -> tuple[int, ...]:
        """Returns the number of real rows of each data index at a step."""
        width = self.plan.width
        sizes = self._sizes(step)
        if self._parts_of is not None:
            if step not in self._parts:
                begin = self._first + step * self._group
                samples = list(chain.from_iterable(self.entries.cut(begin, begin + len(sizes))))
                # Kept, since the entries are forgotten while workers read ahead.
                self._parts[step] = self._parts_of(samples, width)
            return self._parts[step]
        if self._is_cut:
            share, extra = divmod(sum(sizes), width)
            return tuple(share + (index < extra) for index in range(width))
        return tuple(sizes) + (0,) * (width - len(sizes))


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
        self.schedule: BatchSchedule | None = None

    def __iter__(self) -> Iterator[Any]:
        # torch creates the iterators of all samplers here, before it draws the seed of the workers.
        if self.schedule is not None:
            self.schedule.entries.begin()
        # Bound now, not at the first `next`: a loader with workers may keep drawing from it while a new epoch starts.
        return self._draw(self.schedule, self.key)

    def _draw(self, schedule: BatchSchedule | None, key: int) -> Iterator[Any]:
        if schedule is None:
            return
        for step in count():
            for index in self.indexes:
                indices = schedule.indices(step, index)
                if indices is None:
                    return
                if self.with_places:
                    yield Indices(indices, key, schedule.place(step, index))
                elif self.scalar:
                    yield indices[0]
                else:
                    yield indices
