"""`StatusLine`: a line on the launcher's terminal now and then, for scripts that show nothing of their progress.

The processes write to the same terminal, and a line of ours must not come between the updates of a progress bar. What they
write does not pass through the launcher; but the terminal's device notes when it was last written to (Linux: in steps of 8
seconds). So a line is written only where nobody has written since the line before, or since the start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from paceline.watch.journal import rank_file
from paceline.watch.plain import status
from paceline.watch.tail import latest

_FIRST_S = 30.0
_MOST_S = 300.0


class StatusLine:
    """Writes the lines. `poll` is cheap: its caller may call it ten times a second.

    Args:
        folder: of the journal.
        stream: the launcher's standard error.
        written_at: says when the terminal was last written to; None asks its device.
        now: seconds that only grow.
    """

    def __init__(
        self,
        folder: Path,
        stream: TextIO,
        written_at: Callable[[], float] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._stream = stream
        self._now = now
        self._is_terminal = stream.isatty()
        self._written_at = written_at or self._device_time
        self._wait_s = _FIRST_S
        self._next = now() + _FIRST_S
        self._seen = self._written_at() if self._is_terminal else 0.0

    def poll(self) -> None:
        """Writes a line where it is time for one, and nobody else writes."""
        if not self._is_terminal or self._now() < self._next:
            return
        self._next = self._now() + self._wait_s
        written_at = self._written_at()
        if written_at != self._seen or not self._is_in_front():
            self._seen = written_at
            return
        # The files of rank 0 may be on another host, which then says how far the run is.
        snapshot = latest(self._folder) if (self._folder / rank_file(0)).exists() else None
        if snapshot is None:
            return
        try:
            self._stream.write(f"paceline: {status(snapshot)}\n")
            self._stream.flush()
        except OSError:  # the terminal was closed; the run goes on
            self._is_terminal = False
            return
        self._seen = self._written_at()
        self._wait_s = min(_MOST_S, 2 * self._wait_s)
        self._next = self._now() + self._wait_s

    def _device_time(self) -> float:
        try:
            return os.fstat(self._stream.fileno()).st_mtime
        except OSError:
            return time.time()

    def _is_in_front(self) -> bool:
        """Whether this job has the terminal: a line of one in the background comes between what others do."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except OSError:
            return False
