"""`Series` keeps the values of one logged name in bounded memory, and all extremes. `RunView` has one for each name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

# (step, number of the value, value). Steps may repeat; numbers never do.
_Point = tuple[float, int, float]

MOST_BUCKETS = 660  # of three points at most: about 2,000 points
_FEWEST_BUCKETS = 8


class Series:
    """Holds values in buckets, of which each keeps its smallest, its largest and its first non-finite value.

    If there are too many buckets, each two neighbours are joined, and from then on a bucket takes twice as many values. So a
    spike or a NaN stays visible, however long the run is.

    Attributes:
        count: the number of values so far.
        last: the latest value; NaN before the first one.
        last_step: the step of the latest value.
        not_finite_since: the step since which values have not been finite; None if the latest value is.
        most: the largest number of buckets; it may be lowered at any time.
    """

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.count = 0
        self.last = math.nan
        self.last_step = 0.0
        self.not_finite_since: float | None = None
        self.most = most
        self._width = 1  # how many values a bucket takes
        self._buckets: list[list[_Point]] = []
        self._in_last = 0  # how many values the last bucket has taken
        self._is_by_step = True
        self._may_go_back = False

    @property
    def is_by_step(self) -> bool:
        """Whether steps never decrease. If they do, points are drawn over the number of the value."""
        return self._is_by_step

    def add(self, step: float, value: float) -> None:
        """Adds a value. A step that is smaller than the last one is unusual: see `restart`."""
        if self.count and step < self.last_step:
            self._go_back(step)
        self._may_go_back = False
        point = (step, self.count, value)
        if self._buckets and self._in_last < self._width:
            self._buckets[-1] = _extremes([*self._buckets[-1], point])
            self._in_last += 1
        else:
            self._buckets.append([point])
            self._in_last = 1
        while len(self._buckets) > max(self.most, _FEWEST_BUCKETS):
            self._halve()
        if math.isfinite(value):
            self.not_finite_since = None
        elif self.not_finite_since is None:
            self.not_finite_since = step
        self.count += 1
        self.last = value
        self.last_step = step

    def restart(self) -> None:
        """Notes that the run may return to an earlier step. Values of repeated steps then replace the old ones."""
        self._may_go_back = True

    def _go_back(self, step: float) -> None:
        """Removes the values from `step` on, if the run has restarted; otherwise the script's steps are no axis."""
        if not self._may_go_back or not self._is_by_step:
            self._is_by_step = False
            return
        while self._buckets:
            self._in_last = self._width
            before = [point for point in self._buckets[-1] if point[0] < step]
            if before:
                self._buckets[-1] = before
                break
            self._buckets.pop()

    def points(self) -> list[list[Any]]:
        """Returns [x, value] of each point that was kept, sorted by x; the latest value is always the last point."""
        points: list[list[Any]] = []
        for step, number, value in chain.from_iterable(self._buckets):
            points.append([step if self._is_by_step else number, json_number(value)])
        latest = [self.last_step if self._is_by_step else self.count - 1, json_number(self.last)]
        if points and points[-1] != latest:
            points.append(latest)
        return points

    def _halve(self) -> None:
        """Joins each two neighbouring buckets; an odd last one stays alone, and has room."""
        if len(self._buckets) % 2 == 0:
            self._in_last += self._width
        halved = []
        for first in range(0, len(self._buckets), 2):
            pair = self._buckets[first : first + 2]
            halved.append(_extremes(list(chain.from_iterable(pair))))
        self._buckets = halved
        self._width *= 2


def _extremes(points: Sequence[_Point]) -> list[_Point]:
    """Returns the smallest, the largest and the first non-finite of some points, in their order."""
    finite: list[_Point] = []
    not_finite: list[_Point] = []
    for point in points:
        if math.isfinite(point[2]):
            finite.append(point)
        else:
            not_finite.append(point)
    extremes = set(not_finite[:1])
    if finite:
        extremes.add(min(finite, key=lambda point: point[2]))
        extremes.add(max(finite, key=lambda point: point[2]))
    return sorted(extremes, key=lambda point: point[1])


class AllSeries:
    """Holds a series for each name, within a bound for the memory of all of them together.

    Attributes:
        by_name: the series, in the order in which the names first appeared.
        left_out: the number of values of names that were left out, since there were too many names.
    """

    MOST_NAMES = 20_000
    _ALL_BUCKETS = 60_000

    def __init__(self) -> None:
        self.by_name: dict[str, Series] = {}
        self.left_out = 0
        self._not_finite: dict[str, Series] = {}

    def add(self, step: float, values: Mapping[str, float]) -> None:
        """Adds the values of one step."""
        for name, value in values.items():
            series = self.by_name.get(name)
            if series is None and len(self.by_name) >= self.MOST_NAMES:
                self.left_out += 1
                continue
            most = min(MOST_BUCKETS, self._ALL_BUCKETS // max(1, len(self.by_name)))
            if series is None:
                series = self.by_name[name] = Series(most)
            series.most = most
            series.add(step, value)
            if series.not_finite_since is None:
                self._not_finite.pop(name, None)
            else:
                self._not_finite[name] = series

    def restart(self) -> None:
        """See `Series.restart`."""
        for series in self.by_name.values():
            series.restart()

    def not_finite(self) -> dict[str, list[float | str]]:
        """Returns up to 20 names whose latest value is not finite, each with that value and the step since when."""
        latest: dict[str, list[float | str]] = {}
        for name, series in list(self._not_finite.items())[:20]:
            assert series.not_finite_since is not None, "a series that is kept here is not finite"
            latest[name] = [json_number(series.last), series.not_finite_since]
        return latest

    def last(self, name: str) -> float | str | None:
        """Returns the latest value of a name in types of JSON; None before the first one."""
        series = self.by_name.get(name)
        if series is None or series.count == 0:
            return None
        return json_number(series.last)


def json_number(value: float) -> float | str:
    """Returns a float in types of JSON: "nan", "inf" and "-inf" for those that are not finite."""
    return value if math.isfinite(value) else str(value)
