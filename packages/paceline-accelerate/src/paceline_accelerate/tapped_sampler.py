"""`TappedSampler`: the sampler of the inner DataLoader in accelerate's loaders.

It yields the entries that this process loads, and records the number of samples in each step for `loader_feed.SamplerFeed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from paceline_accelerate.sample_order import RowsOfRank, Step
from paceline_accelerate.samplers import BatchSamplerShard

# The entry for the dataset (a list of indices or one index; None if this process has nothing), and the rows of the step.
Load = tuple[Any, RowsOfRank]


class TappedSampler:
    """Yields what this process loads, and records the rows of each step for `SamplerFeed`.

    Args:
        sampler: yields lists of indices, or single ones.
        is_scalar: whether the dataset gets one index at a time, and not a list.
        num_first: how many of an epoch's first entries are kept in `left_out` if they are skipped.

    Attributes:
        start: number of steps, and number of samples of all processes, that are skipped.
        drawing: context in which the sampler draws random numbers; None for the process's own streams.
        rows: rows of the steps whose entries were yielded, the oldest first.
        left_out: entries of the first steps, if those were skipped.
        idle: a step at which this process has nothing.
    """

    def __init__(self, sampler: Any, is_scalar: bool, num_first: int = 0) -> None:
        self._sampler = sampler
        self._is_scalar = is_scalar
        self._num_first = num_first
        self.start: tuple[int, int] = (0, 0)
        self.drawing: Callable[[], AbstractContextManager[None]] | None = None
        self.rows: deque[RowsOfRank] = deque()
        self.left_out: list[Any] = []
        self.idle: Step | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # This iteration keeps references to its own new objects, because workers may still be served from an earlier one.
        self.rows = deque()
        self.left_out = []
        self.idle = None
        loads = self._shard_loads() if isinstance(self._sampler, BatchSamplerShard) else self._all_loads()
        if self.drawing is not None:
            loads = _drawn_in(self.drawing, loads)
        return _recorded(self._without_skipped(loads, self.left_out), self.rows)

    def _all_loads(self) -> Iterator[Load]:
        """Yields every entry, for a process that is alone."""
        rows = RowsOfRank((0,), (0,))
        for entry in self._sampler:
            count = len(entry) if isinstance(entry, (list, tuple)) else 1
            if count != rows.real[0]:
                rows = RowsOfRank((count,), (count,))
            yield entry, rows

    def _shard_loads(self) -> Iterator[Load]:
        """Yields this process's part of each step; None where it has nothing."""
        for step in self._sampler.steps():
            samples = step.parts[self._sampler.process_index]
            if not samples:
                self.idle = step
                yield None, step.rows
            elif self._is_scalar:
                yield samples[0], step.rows
            else:
                yield list(samples), step.rows

    def _without_skipped(self, loads: Iterator[Load], left_out: list[Any]) -> Iterator[Load]:
        """Yields the loads after the steps, or the samples, that `start` skips."""
        steps_before, samples_before = self.start
        samples = 0
        for step, (entry, rows) in enumerate(loads, 1):
            samples += sum(rows.real)
            # With another batch size a step may have been used in part. It comes again, so that no sample is lost.
            if step > steps_before and samples > samples_before:
                yield entry, rows
                break
            if len(left_out) < self._num_first:
                left_out.append([entry] if self._is_scalar else entry)
        yield from loads


def _recorded(loads: Iterator[Load], recorded_rows: deque[RowsOfRank]) -> Iterator[Any]:
    """Yields the entries for the dataset, and records their rows; steps without an entry are left out."""
    for entry, rows in loads:
        if entry is not None:
            recorded_rows.append(rows)
            yield entry


def _drawn_in(drawing: Callable[[], AbstractContextManager[None]], loads: Iterator[Load]) -> Iterator[Load]:
    """Yields the same loads. The sampler draws the random numbers of each of them in a context."""
    while True:
        with drawing():
            load = next(loads, None)
        if load is None:
            return
        yield load
