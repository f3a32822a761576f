"""`thinned` makes the journal file of a long run smaller: older lines become coarser, and rare lines stay.

In the first three quarters of the lines, each two ticks are joined to one with the sum of their times, and every second line
of values or anomalies is left out. Lines that were thinned before are thinned again: of a run of a week, the last hours have a
line for each second, and the first days one for each minute. `JournalWriter` calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline_lens.watch.records import (
    AnomalyFound,
    Hello,
    JournalRecord,
    PlanMade,
    Thinned,
    Tick,
    ValuesLogged,
    line_of,
    record_of,
)

_FREQUENT = (AnomalyFound, ValuesLogged)
_STARTS = (Hello, PlanMade)  # without them the lines that follow mean nothing
_MOST_TURNS = 20


def thinned(lines: Sequence[bytes], limit_bytes: int) -> tuple[bytes, list[bytes]]:
    """Returns the line that says what was left out, and the lines that stay: about `limit_bytes` at most.

    If thinning is not enough, the oldest lines are left out, except for those that begin a round.
    """
    mark, t = _mark_of(lines)
    remaining = list(lines[1:]) if mark.times else list(lines)
    before = len(remaining)
    for _ in range(_MOST_TURNS):
        if sum(map(len, remaining)) <= limit_bytes:
            break
        remaining = _coarser(remaining)
    remaining = _newest(remaining, limit_bytes)
    new = Thinned(mark.times + 1, mark.dropped + before - len(remaining))
    return line_of(new, t), remaining


def _newest(lines: list[bytes], limit_bytes: int) -> list[bytes]:
    """Leaves out the oldest lines until the others fit."""
    excess = sum(map(len, lines)) - limit_bytes
    newest = []
    for line in lines:
        if excess > 0 and not isinstance(_record(line)[1], _STARTS):
            excess -= len(line)
        else:
            newest.append(line)
    return newest


def _mark_of(lines: Sequence[bytes]) -> tuple[Thinned, float]:
    """Returns what earlier thinnings have left out, and the time of the first line."""
    if not lines:
        return Thinned(), 0.0
    t, record = _record(lines[0])
    if isinstance(record, Thinned):
        return record, t
    return Thinned(), t


def _record(line: bytes) -> tuple[float, JournalRecord | None]:
    try:
        return record_of(line)
    except ValueError:
        return 0.0, None


def _coarser(lines: Sequence[bytes]) -> list[bytes]:
    """Joins ticks in pairs and leaves out every second line of other frequent kinds, up to the last quarter."""
    recent = len(lines) * 3 // 4
    coarser: list[bytes] = []
    waiting: tuple[Tick, int] | None = None  # a tick to which the next one is joined, and its place in `coarser`
    left_out: type[JournalRecord] | None = None  # the kind of the last frequent line, if that was left out
    for line in lines[:recent]:
        t, record = _record(line)
        if record is None:
            continue  # a crash has damaged it, or it is of a newer version
        if isinstance(record, Tick):
            if waiting is None:
                waiting = record, len(coarser)
                coarser.append(line)
            else:
                first, place = waiting
                coarser[place] = b""
                coarser.append(line_of(_joined(first, record), t))
                waiting = None
        elif isinstance(record, _FREQUENT):
            stays = left_out is type(record)
            left_out = None if stays else type(record)
            if stays:
                coarser.append(line)
        else:
            coarser.append(line)
            if isinstance(record, _STARTS):
                waiting = None  # ticks of two rounds are not joined
    return [line for line in (*coarser, *lines[recent:]) if line]


def _joined(first: Tick, second: Tick) -> Tick:
    """Returns one tick for the time of two."""
    return replace(
        second,
        ms=_sum(first.ms, second.ms),
        waits=_sum(first.waits, second.waits),
        steps=first.steps + second.steps,
    )


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    total = dict(first)
    for name, value in second.items():
        total[name] = total.get(name, 0.0) + value
    return total
