"""Makes the file of a long run smaller: what is older gets coarser, what happens rarely stays.

Of the first three quarters of the lines, two ticks in a row become one, with the sum of their times, and every second line of
values or anomalies goes. What was thinned before gets thinned again: a run of a week has its last hours by the second, its
first days by the minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.watch.records import Anomaly, Hello, PlanMade, Record, Thinned, Tick, Values, line_of, record_of

_FREQUENT = (Anomaly, Values)
_STARTS = (Hello, PlanMade)  # without them the lines that follow mean nothing
_MOST_TURNS = 20


def thinned(lines: Sequence[bytes], limit_bytes: int) -> tuple[bytes, list[bytes]]:
    """The line that says what was left out, and the lines that stay: at most about `limit_bytes`.

    Where even that is not enough, the oldest lines are left out, apart from those that begin a round.
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
    """What an earlier thinning has left out, and the moment of the first line."""
    t, record = _record(lines[0]) if lines else (0.0, None)
    return (record if isinstance(record, Thinned) else Thinned()), t


def _record(line: bytes) -> tuple[float, Record | None]:
    try:
        return record_of(line)
    except ValueError:
        return 0.0, None


def _coarser(lines: Sequence[bytes]) -> list[bytes]:
    """Joins ticks in pairs and leaves out every second line of other frequent kinds, up to the last quarter."""
    recent = len(lines) * 3 // 4
    coarser: list[bytes] = []
    waiting: tuple[Tick, int] | None = None  # a tick that the next joins, and its place in `coarser`
    left_out: type[Record] | None = None
    for line in lines[:recent]:
        t, record = _record(line)
        if record is None:
            continue  # it is damaged, or was damaged by a crash
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
            stays = left_out is type(record)  # the one before it was left out
            left_out = None if stays else type(record)
            if stays:
                coarser.append(line)
        else:
            coarser.append(line)
            if isinstance(record, _STARTS):
                waiting = None  # ticks of two rounds are not joined
    return [line for line in (*coarser, *lines[recent:]) if line]


def _joined(first: Tick, second: Tick) -> Tick:
    """One tick over the time of two."""
    ms, waits = _sum(first.ms, second.ms), _sum(first.waits, second.waits)
    return replace(second, ms=ms, waits=waits, steps=first.steps + second.steps)


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    names = [*first, *(name for name in second if name not in first)]
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in names}
