"""`TappedSampler`: stands in a DataLoader, gives it what this process loads, and notes the rows of each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from paceline.compat.accelerate.sample_order import Rows, Step
from paceline.compat.accelerate.samplers import BatchSamplerShard

# An entry for the dataset (a list of indices, or one index), None where this process has nothing, and the step's rows.
Load = tuple[Any, Rows]


class TappedSampler:
    """The sampler of the inner DataLoader.

    Args:
        sampler: gives lists of indices, or single ones.
        is_scalar: the dataset is given one entry at a time, and no list of them.
        num_first: how many of an epoch's first entries are remembered, where they are left out.

    Attributes:
        start: steps, and samples of all processes, that are left out.
        drawing: a context that the sampler draws inside of; None for the process's own streams.
        rows: of the steps that were passed on, the oldest first.
        left_out: the indices of the first steps, where those were left out.
        idle: a step at which this process has nothing.
    """

    def __init__(self, sampler: Any, is_scalar: bool, num_first: int = 0) -> None:
        self._sampler = sampler
        self._is_scalar = is_scalar
        self._num_first = num_first
        self.start: tuple[int, int] = (0, 0)
        self.drawing: Callable[[], AbstractContextManager[None]] | None = None
        self.rows: deque[Rows] = deque()
        self.left_out: list[Any] = []
        self.idle: Step | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # New objects, to which this iteration is bound: workers may be served from it while the next one begins.
        self.rows = deque()
        self.left_out = []
        self.idle = None
        loads = self._part() if isinstance(self._sampler, BatchSamplerShard) else self._everything()
        if self.drawing is not None:
            loads = _inside(self.drawing, loads)
        return _noted(self._rest(loads, self.left_out), self.rows)

    def _everything(self) -> Iterator[Load]:
        """Where one process loads all entries."""
        rows = Rows((0,), (0,))
        for entry in self._sampler:
            count = len(entry) if isinstance(entry, (list, tuple)) else 1
            if count != rows.real[0]:
                rows = Rows((count,), (count,))
            yield entry, rows

    def _part(self) -> Iterator[Load]:
        """This process's part of each step; None where it has nothing."""
        for step in self._sampler.steps():
            samples = step.parts[self._sampler.process_index]
            if not samples:
                self.idle = step
                yield None, step.rows
            elif self._is_scalar:
                yield samples[0], step.rows
            else:
                yield list(samples), step.rows

    def _rest(self, loads: Iterator[Load], left_out: list[Any]) -> Iterator[Load]:
        """What comes after the steps, or the samples, at which the epoch starts."""
        steps_before, samples_before = self.start
        samples = 0
        for step, (entry, rows) in enumerate(loads, 1):
            samples += sum(rows.real)
            # A step that was used in part, at another size of batches, comes again: no sample is left out.
            if step > steps_before and samples > samples_before:
                yield entry, rows
                break
            if len(left_out) < self._num_first:
                left_out.append([entry] if self._is_scalar else entry)
        yield from loads


def _noted(loads: Iterator[Load], noted_rows: deque[Rows]) -> Iterator[Any]:
    """The entries for the dataset, where there are any."""
    for entry, rows in loads:
        if entry is not None:
            noted_rows.append(rows)
            yield entry


def _inside(drawing: Callable[[], AbstractContextManager[None]], loads: Iterator[Load]) -> Iterator[Load]:
    """The same, each drawn inside of a context."""
    while True:
        with drawing():
            load = next(loads, None)
        if load is None:
            return
        yield load
