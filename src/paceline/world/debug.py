"""Debug mode: explains hangs. (First version: see `Watch.check`.)"""

from __future__ import annotations

from typing import Any


class Watch:
    """Checks that all ranks of a group enter the same operation."""

    def __init__(self, group: Any, timeout_s: float | None = None) -> None:
        self.group = group

    def check(self, op: str, detail: str = "") -> None:
        """Not yet."""
