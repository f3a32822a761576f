"""`ShownLines`: which lines of a pod's log were shown already; `follow` asks it when a log is read again from its middle."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator

_SECOND = len("2026-11-22T08:15:00")  # characters of a time stamp up to the second


class ShownLines:
    """Counts the lines of one pod that were shown, by their time stamps.

    A line is recognised by its time stamp and its number among the lines with the same time stamp. The time stamp alone is not
    enough: a container may write several lines at the same time, and lines of its two streams may be a little out of order.
    The number is the same on each connection, because a connection that delivers one line with a time stamp delivers all of
    them: the kubelet reads the log from the beginning of the second in which `last` lies.

    Attributes:
        last: the latest time stamp of a line that was shown; "" before the first line.
    """

    def __init__(self) -> None:
        self.last = ""
        self._counts: Counter[str] = Counter()
        # Time stamps before this second are not counted any more, so that memory does not grow with the log.
        self._oldest_second = ""
        # A restart of the container begins a second thread, and for a moment both may read the log.
        self._guard = threading.Lock()

    def new_lines(self, lines: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
        """Yields the text of those lines that no connection has shown.

        Args:
            lines: time stamp and text of each line of one connection.
        """
        numbers: Counter[str] = Counter()
        oldest_second = ""
        for stamp, text in lines:
            numbers[stamp] += 1
            if self._is_new(stamp, numbers[stamp]):
                yield text
            if oldest_second != self._oldest_second:
                oldest_second = self._oldest_second
                numbers = _counts_from(numbers, oldest_second)

    def _is_new(self, stamp: str, number: int) -> bool:
        """Returns whether a line was not shown yet; from then on it counts as shown."""
        with self._guard:
            if stamp < self._oldest_second or number <= self._counts[stamp]:
                return False
            self._counts[stamp] = number
            if stamp > self.last:
                last_second = self.last[:_SECOND]
                self.last = stamp
                if stamp[:_SECOND] != last_second:
                    self._oldest_second = last_second
                    self._counts = _counts_from(self._counts, last_second)
            return True


def _counts_from(counts: Counter[str], second: str) -> Counter[str]:
    return Counter({stamp: count for stamp, count in counts.items() if stamp >= second})
