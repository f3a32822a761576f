"""How the samples of an epoch meet the processes under accelerate's names. Pure: from batches, or rows, to steps.

A step is what all processes load at once: whole batches, one each, or the pieces of one batch. Only an epoch's last step can
be short; it is dropped, filled up with the samples of the first step, or left short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, NamedTuple


class Rows(NamedTuple):
    """How many samples each process has at a step.

    Attributes:
        real: without filler, which stands behind all real samples.
        loaded: with filler.
    """

    real: tuple[int, ...]
    loaded: tuple[int, ...]


class Step(NamedTuple):
    """What all processes load at once.

    Attributes:
        parts: the samples of each process; empty for one that has nothing.
        real: as in `Rows`.
    """

    parts: Sequence[Sequence[Any]]
    real: tuple[int, ...]

    @property
    def rows(self) -> Rows:
        """How many samples these are."""
        return Rows(self.real, tuple(len(part) for part in self.parts))

    @property
    def spare(self) -> Any:
        """A sample that a process with nothing of its own can load, in order to take part."""
        return next(chain.from_iterable(self.parts))


def steps_of_whole_batches(
    batches: Iterable[Sequence[Any]], width: int, size: int | None, *, drop_last: bool, even: bool
) -> Iterator[Step]:
    """Each step takes the next `width` batches, one for each process.

    Args:
        batches: of an epoch.
        width: number of processes.
        size: samples of a full batch; None where batches have no common size, and are then repeated whole.
        drop_last: leaves out a last step with fewer than `width` batches.
        even: fills up the last step, so that all processes load as much as in any other.
    """
    remaining = iter(batches)
    first_group: list[Sequence[Any]] = []
    group = list(islice(remaining, width))
    while group:
        first_group = first_group or group
        missing = width - len(group)
        if missing and drop_last:
            return
        # A full group needs filling only where its last batch is short, and nothing follows. The sampler is asked for more
        # in that case alone: a random one draws when it is asked, and must not draw earlier than under accelerate.
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
    """The batches of a last step for all processes, where those of the first step follow, again and again."""
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
    """Each step is one batch, cut into a run of `size` / `width` samples for each process; arguments as above."""
    first: Sequence[Any] = ()
    for batch in batches:
        first = first or batch
        # A larger batch, which only a sampler of the script's own can give, is cut into longer runs: nothing is lost.
        rows = -(-max(size, len(batch)) // width)
        missing = rows * width - len(batch)
        if missing and drop_last:
            continue
        real = runs(len(batch), rows, width)
        samples = [*batch, *islice(cycle(first), missing)] if missing and even else batch
        yield Step([samples[rows * index : rows * (index + 1)] for index in range(width)], real)


def runs(count: int, rows: int, width: int) -> tuple[int, ...]:
    """How many of `count` samples each of `width` processes has, where each takes the next `rows` of them."""
    return tuple(min(rows, max(0, count - rows * index)) for index in range(width))


def groups_of_stream(samples: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[tuple[list[Any], int]]:
    """Runs of `size` samples, each with how many of them are no filler; a last short one is dropped or filled up."""
    remaining = iter(samples)
    first: list[Any] = []
    while group := list(islice(remaining, size)):
        first = first or group
        num_real = len(group)
        if num_real < size and drop_last:
            return
        yield [*group, *islice(cycle(first), size - num_real)], num_real
