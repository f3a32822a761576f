"""`Series`: the values of one name over the steps of a run, in bounded memory; extremes survive the thinning."""

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
    """Values of one name, in buckets of which each keeps its smallest, its largest and its first non-finite value.

    Where the buckets are too many, two neighbours become one, and a bucket holds twice as many values from then on. So a
    spike or a NaN stays visible, however long the run.

    Attributes:
        count: values so far.
        last: the latest value; NaN before there is one.
        last_step: its step.
        not_finite_since: step from which on the values have not been finite; None where the latest is.
        most: buckets at most; it may be lowered at any time.
    """

    def __init__(self, most: int = MOST_BUCKETS) -> None:
        self.count = 0
        self.last = math.nan
        self.last_step = 0.0
        self.not_finite_since: float | None = None
        self.most = most
        self._width = 1
        self._buckets: list[list[_Point]] = []
        self._in_last = 0
        self._is_by_step = True
        self._may_go_back = False

    @property
    def is_by_step(self) -> bool:
        """Whether steps only grow. If not, points are drawn over the number of the value."""
        return self._is_by_step

    def add(self, step: float, value: float) -> None:
        """Adds a value; its step is usually not smaller than the last one's."""
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
        """The run may go back to an earlier step, and do the later ones again: these then take the place of the old ones."""
        self._may_go_back = True

    def _go_back(self, step: float) -> None:
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
        """[x, value] of every kept point, x growing; the latest value is always the last one."""
        column = 0 if self._is_by_step else 1
        points = [[point[column], json_number(point[2])] for bucket in self._buckets for point in bucket]
        latest = [self.last_step if self._is_by_step else self.count - 1, json_number(self.last)]
        if points and points[-1] != latest:
            points.append(latest)
        return points

    def _halve(self) -> None:
        if len(self._buckets) % 2 == 0:
            self._in_last += self._width
        halved = []
        for first in range(0, len(self._buckets), 2):
            pair = self._buckets[first : first + 2]
            halved.append(_extremes(list(chain.from_iterable(pair))))
        self._buckets = halved
        self._width *= 2


def _extremes(points: Sequence[_Point]) -> list[_Point]:
    """The smallest, the largest and the first non-finite of some points, in their order."""
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
    """Series by name, within one bound for all of them together.

    Attributes:
        by_name: in the order in which the names came.
        left_out: values of names that came when there were too many already.
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
        """Names whose latest value is not finite, up to 20: that value, and the step since when."""
        names = list(self._not_finite)[:20]
        return {name: [json_number(self._not_finite[name].last), self._since(name)] for name in names}

    def _since(self, name: str) -> float:
        since = self._not_finite[name].not_finite_since
        assert since is not None, "a series that is kept here is not finite"
        return since

    def last(self, name: str) -> float | str | None:
        """The latest value of a name, as JSON has it; None before there is one."""
        series = self.by_name.get(name)
        return None if series is None or not series.count else json_number(series.last)


def json_number(value: float) -> float | str:
    """A float as JSON has it; "nan", "inf" and "-inf" stand for those that it has no word for."""
    return value if math.isfinite(value) else str(value)
