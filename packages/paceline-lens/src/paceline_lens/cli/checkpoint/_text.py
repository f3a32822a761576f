"""How sizes, ages and tables are written; and how far a long reading has come."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.base.text_table import text_table
from paceline.cli.script import ScriptProgress

_EVERY_S = 0.1


def size(count: float) -> str:
    """Writes a number of bytes with a unit, such as "1.2 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(created: float) -> str:
    """Writes how long ago something was made, in the largest unit that fits."""
    seconds = max(0.0, time.time() - created)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def or_dash(value: object) -> str:
    """Writes a value for a table; "-" stands for an unknown one."""
    return "-" if value is None else str(value)


def moment(created: float) -> str:
    """Writes a time in the local time zone, such as "2026-05-04 13:37:00"."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Writes rows in aligned columns below a heading."""
    return "\n".join(text_table(rows, "  "))


class CopyProgress(ScriptProgress):
    """Shows on stderr, if it is a terminal, how many of the bytes have been read.

    Args:
        total: number of bytes to read.
    """

    def __init__(self, total: int) -> None:
        super().__init__("paceline checkpoint")
        self._total = max(total, 1)
        self._done = 0
        self._shown = time.monotonic()

    def __call__(self, count: int) -> None:
        """Counts `count` more bytes as read, and updates the line from time to time."""
        self._done += count
        if self.is_terminal and time.monotonic() - self._shown > _EVERY_S:
            self._shown = time.monotonic()
            self.show(f"{self._done / self._total:.0%} of {size(self._total)}")
