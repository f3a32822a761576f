"""`FollowedRun` reads the journal of a run as it grows, and looks at those processes of the run that are on this host.

The lines in the terminal, the page and the frozen page get their snapshots from it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.base.process_name import process_state
from paceline_lens.processes import process_exists
from paceline_lens.watch.journal import JournalReader
from paceline_lens.watch.records import Hello
from paceline_lens.watch.registry import registered_runs
from paceline_lens.watch.view import RunView

_SILENT_S = 3.0  # ranks write every second; the process of a rank that has not written for so long is looked at


class FollowedRun:
    """Follows a run. Any thread may ask for snapshots.

    Args:
        path: the folder of a run, or the folder of its journal.

    Attributes:
        folder: the folder of the journal.

    Raises:
        ConfigError: `watch-folder`, `watch-version`.
    """

    def __init__(self, path: str | Path) -> None:
        self._reader = JournalReader(path)
        self._view = RunView(self._reader.header)
        self._lock = threading.Lock()
        self._pids: dict[int, int] = {}  # the processes of the ranks on this host, by rank
        self._heard: dict[int, float] = {}  # the time of the last line of each rank
        self.folder = self._reader.folder

    def snapshot(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Returns what is shown of the run now; see `view.py`.

        Args:
            names: the names whose series it contains; None for the first ones.
        """
        with self._lock:
            self._read()
            self._look_for_processes()
            return self._view.snapshot(time.time(), names)

    def _read(self) -> None:
        lines = self._reader.read()
        if self._reader.has_late_file:
            # A view takes lines in the order of their times, and the new file may have earlier ones: everything is read again.
            self._reader = JournalReader(self.folder)
            self._view = RunView(self._reader.header)
            lines = self._reader.read()
        for line in lines:
            if isinstance(line.record, Hello) and line.record.host == socket.gethostname():
                self._pids[line.number] = line.record.pid
            if line.role == "rank":
                self._heard[line.number] = line.t
            self._view.add(line)

    def _look_for_processes(self) -> None:
        """Looks at the processes of silent ranks on this host, and at the launcher's process if all ranks are silent."""
        now = time.time()
        for rank, pid in self._pids.items():
            is_silent = now - self._heard[rank] > _SILENT_S
            self._view.note_process(rank, _state_of(pid) if is_silent else "")
        last = max(self._heard.values(), default=self._reader.header.started)
        if now - last > _SILENT_S and self._launcher_has_gone():
            self._view.launcher_has_gone(now)

    def _launcher_has_gone(self) -> bool:
        """Returns whether the launcher was on this host and its process has ended."""
        header = self._reader.header
        if header.host != socket.gethostname():
            return False
        for run in registered_runs():
            # A run that was started again in the same folder has a newer entry, and that one counts.
            is_same = run.watch != "" and Path(run.watch) == self.folder.absolute()
            if is_same and run.started >= header.started - 60:
                return run.state == "lost"
        return not process_exists(header.pid)


def _state_of(pid: int) -> str:
    """Returns "stopped", "gone", or "" for a process that runs."""
    state = process_state(pid)
    if state in ("t", "T"):
        return "stopped"
    return "gone" if state in ("Z", "X") or not process_exists(pid) else ""
