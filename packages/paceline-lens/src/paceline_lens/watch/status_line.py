"""`StatusLine` writes a line to the launcher's terminal now and then, for scripts that print nothing about their progress.

The processes write to the same terminal, and a line of the launcher must not appear between the updates of a progress bar.
What they write does not pass through the launcher. But the device of the terminal has the time of the last write (on Linux in
steps of 8 seconds). So a line is written only if nobody has written since the last line, or since the start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from paceline_lens.watch.journal import rank_file
from paceline_lens.watch.plain import status
from paceline_lens.watch.tail import latest

_FIRST_S = 30.0
_MOST_S = 300.0


class StatusLine:
    """Writes the lines. `poll` is cheap: the launcher may call it ten times a second.

    Args:
        folder: the folder of the journal.
        stream: the launcher's standard error.
        written_at: returns when the terminal was last written to; None for the time of its device.
        now: a clock in seconds that never goes back.
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
        """Writes a line if it is time for one and nobody else writes."""
        if not self._is_terminal or self._now() < self._next:
            return
        self._next = self._now() + self._wait_s
        written_at = self._written_at()
        if written_at != self._seen or not self._is_in_front():
            self._seen = written_at
            return
        # Only the host of rank 0 writes lines: the others do not have its file.
        if not (self._folder / rank_file(0)).exists():
            return
        snapshot = latest(self._folder)
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
        """Returns whether this job is in the foreground: a line of a background job would disturb the job in front."""
        try:
            return os.tcgetpgrp(self._stream.fileno()) == os.getpgrp()
        except OSError:
            return False
