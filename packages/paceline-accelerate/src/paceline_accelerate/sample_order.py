"""Divides the samples of an epoch over the processes as accelerate does: pure functions from batches, or rows, to steps.

A step is what all processes load at once: one whole batch each, or the pieces of a single batch. Only the last step of an
epoch can be short; it is dropped, filled up with the samples of the first step, or left short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, NamedTuple


class RowsOfRank(NamedTuple):
    """The number of samples that each process has at a step.

    Attributes:
        real: without filler; filler comes after all real samples.
        loaded: with filler.
    """

    real: tuple[int, ...]
    loaded: tuple[int, ...]


class Step(NamedTuple):
    """The samples that all processes load at once.

    Attributes:
        parts: the samples of each process; empty for a process that has none.
        real: as in `RowsOfRank`.
    """

    parts: Sequence[Sequence[Any]]
    real: tuple[int, ...]

    @property
    def rows(self) -> RowsOfRank:
        """The numbers of these samples."""
        return RowsOfRank(self.real, tuple(len(part) for part in self.parts))

    @property
    def spare(self) -> Any:
        """A sample that a process without samples of its own can load in order to take part in the step."""
        return next(chain.from_iterable(self.parts))


def steps_of_whole_batches(
    batches: Iterable[Sequence[Any]], width: int, size: int | None, *, drop_last: bool, even: bool
) -> Iterator[Step]:
    """Yields steps that take the next `width` batches, one for each process.

    Args:
        batches: the batches of an epoch.
        width: number of processes.
        size: number of samples of a full batch; None if batches have no common size, in which case filler is whole batches.
        drop_last: whether a last step with fewer than `width` batches is dropped.
        even: whether the last step is filled up, so that all processes load as much as in any other step.
    """
    remaining = iter(batches)
    first_group: list[Sequence[Any]] = []
    group = list(islice(remaining, width))
    while group:
        first_group = first_group or group
        missing = width - len(group)
        if missing and drop_last:
            return
        # A full group needs filler only if its last batch is short and nothing follows. Only then is the sampler asked for the
        # next group already: a random sampler draws when it is asked, and must not draw earlier than under accelerate.
        next_group: list[Sequence[Any]] | None = None
        ends_short = missing > 0
        if not missing and size is not None and len(group[-1]) < size:
            next_group = list(islice(remaining, width))
            ends_short = not next_group
        real = tuple(len(batch) for batch in group) + (0,) * missing
        parts = group + [()] * missing
        if ends_short and even:
            parts = _filled(group, first_group, width, size)
        yield Step(parts, real)
        group = list(islice(remaining, width)) if next_group is None else next_group


def _filled(
    group: Sequence[Sequence[Any]], first_group: Sequence[Sequence[Any]], width: int, size: int | None
) -> list[Sequence[Any]]:
    """Returns the batches of a last step, filled up with the samples of the first step, which repeat if they are too few."""
    missing = width - len(group)
    if size is None:
        return [*group, *islice(cycle(first_group), missing)]
    filler = cycle(chain.from_iterable(first_group))
    filled: list[Sequence[Any]] = []
    for batch in [*group, *([()] * missing)]:
        filled.append([*batch, *islice(filler, max(0, size - len(batch)))])
    return filled


def steps_of_split_batches(
    batches: Iterable[Sequence[Any]], width: int, size: int, *, drop_last: bool, even: bool
) -> Iterator[Step]:
    """Yields steps of one batch each, which is cut into `size / width` samples for each process.

    The arguments are those of `steps_of_whole_batches`.
    """
    first: Sequence[Any] = ()
    for batch in batches:
        first = first or batch
        # A batch sampler of a script may yield a batch above `size`: it is cut into longer runs, so that no sample is lost.
        rows = -(-max(size, len(batch)) // width)  # the quotient is rounded up
        missing = rows * width - len(batch)
        if missing and drop_last:
            continue
        real = runs(len(batch), rows, width)
        samples = batch
        if missing and even:
            samples = [*batch, *islice(cycle(first), missing)]
        parts = [samples[rows * index : rows * (index + 1)] for index in range(width)]
        yield Step(parts, real)


def runs(count: int, rows: int, width: int) -> tuple[int, ...]:
    """Returns how many of `count` samples each of `width` processes has if each takes the next `rows` of them."""
    return tuple(min(rows, max(0, count - rows * index)) for index in range(width))


def groups_of_stream(samples: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[tuple[list[Any], int]]:
    """Yields groups of `size` samples with their number of real ones; a short last group is dropped or filled up."""
    remaining = iter(samples)
    first: list[Any] = []
    while group := list(islice(remaining, size)):
        first = first or group
        num_real = len(group)
        if num_real < size and drop_last:
            return
        yield [*group, *islice(cycle(first), size - num_real)], num_real
