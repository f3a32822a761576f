"""Which samples each process loads at each step: pure functions of a batch sampler's batches, or of a stream's rows.

    whole     [0 1] [2 3] | [4 5] [6 .]     each process loads one batch of a group of as many batches as processes
    split     [0 1 | 2 3] [4 5 | 6 .]       each process loads a run of every batch

A short end is filled with the epoch's first samples where batches are made even; else it stays short, and some processes may
have nothing at all. Which rows are no filler is known here, and goes along with the indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any, NamedTuple


class Share(NamedTuple):
    """What one process loads at a step.

    Attributes:
        indices: its samples; empty where it has none.
        real: rows of each process that are no filler; they stand first.
        loaded: rows of each process, filler included.
        spare: a sample that some process loads at this step.
    """

    indices: Sequence[Any]
    real: tuple[int, ...]
    loaded: tuple[int, ...]
    spare: Any = None


def shares_of_whole_batches(
    batches: Iterable[Sequence[Any]], width: int, index: int, size: int | None, *, drop_last: bool, even: bool
) -> Iterator[Share]:
    """One batch of each group of `width` batches.

    Args:
        batches: the epoch's, in order.
        width, index: how many processes there are, and which one this is.
        size: rows of a full batch; None where batches are as long as they are.
        drop_last: leaves out a last group that is not full.
        even: fills a last group that is not full.
    """
    first_group: list[Sequence[Any]] = []
    group: list[Sequence[Any]] = []
    for batch in batches:
        if len(group) == width:  # it holds a short batch, and is not the last
            yield _share(group, group, width, index)
            group = []
        group.append(batch)
        first_group = first_group or group
        if len(group) == width and all(size in (None, len(member)) for member in group):
            yield _share(group, group, width, index)
            group = []
    if not group or drop_last:
        return
    if even:
        yield _share(group, _filled(group, first_group, width, size), width, index)
    else:
        yield _share(group, group, width, index)


def _filled(
    group: Sequence[Sequence[Any]], first_group: Sequence[Sequence[Any]], width: int, size: int | None
) -> list[Sequence[Any]]:
    """`width` batches: those of a last group, and what is missing from the epoch's first group, again and again."""
    if size is None:
        return [*group, *islice(cycle(first_group), width - len(group))]
    filler = cycle(list(chain.from_iterable(first_group)))
    members = [*group, *([()] * (width - len(group)))]
    return [[*member, *islice(filler, size - len(member))] for member in members]


def _share(real: Sequence[Sequence[Any]], loaded: Sequence[Sequence[Any]], width: int, index: int) -> Share:
    indices = loaded[index] if index < len(loaded) else ()
    return Share(indices, _lengths(real, width), _lengths(loaded, width), real[0][0])


def _lengths(group: Sequence[Sequence[Any]], width: int) -> tuple[int, ...]:
    return tuple(map(len, group)) + (0,) * (width - len(group))


def shares_of_split_batches(
    batches: Iterable[Sequence[Any]], width: int, index: int, size: int, *, drop_last: bool, even: bool
) -> Iterator[Share]:
    """A run of `size` / `width` rows of each batch; arguments as for whole batches."""
    rows = size // width
    first: Sequence[Any] = ()
    for batch in batches:
        first = first or batch
        whole = list(batch)
        if len(batch) < size:
            if drop_last:
                continue
            if even:
                whole += islice(cycle(first), size - len(batch))
        indices = whole[rows * index : rows * (index + 1)]
        yield Share(indices, runs(len(batch), rows, width), runs(len(whole), rows, width), batch[0])


def runs(count: int, rows: int, width: int) -> tuple[int, ...]:
    """How many of `count` rows each of `width` processes has, where each takes the next `rows` of them."""
    return tuple(max(0, min(rows, count - rows * place)) for place in range(width))


def shares_of_stream(
    rows: Iterable[Any], width: int, index: int, size: int, *, drop_last: bool
) -> Iterator[tuple[list[Any], int]]:
    """A run of `size` rows out of each `width` * `size` of a stream, with how many of all these rows are no filler.

    A short end is filled with the stream's first rows, unless it is dropped.
    """
    total = width * size
    rows = iter(rows)
    first: list[Any] = []
    while group := list(islice(rows, total)):
        first = first or group
        num_real = len(group)
        if num_real < total:
            if drop_last:
                return
            group = group + list(islice(cycle(first), total - num_real))
        yield group[size * index : size * (index + 1)], num_real
