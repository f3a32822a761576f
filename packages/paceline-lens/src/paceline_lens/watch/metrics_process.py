"""`MetricsProcess`: serves the metrics of a run to Prometheus from a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class MetricsProcess:
    """`paceline metrics` for a watched run, until it is closed or the launcher and its processes have ended.

    It is a process and not a thread, because the launcher forks its workers.

    Args:
        folder: of the journal.
        port: to listen on, on the loopback address.
    """

    def __init__(self, folder: Path, port: int) -> None:
        # The process reads from a pipe, and ends when that is closed: by `end`, or because all that hold it have ended.
        command = [sys.executable, "-m", "paceline", "metrics", str(folder), "--port", str(port), "--until-closed"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def end(self) -> None:
        """Ends it after the run."""
        try:
            self._process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
