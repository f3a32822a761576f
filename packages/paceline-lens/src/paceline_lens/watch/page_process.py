"""`PageProcess`: serves the page and the metrics of a run from a process of its own, which writes `report.html` at the end.

A launcher has no threads, since its workers may be forks of it, and serving the page must not slow it down. So there is a
process for it, which reads its standard input:

    launcher                          this process
    starts it                         prints the URL of the page, serves it, and metrics where a port is named
    writes "end", or dies             writes report.html, shows the last state to pages that are open, ends

The launcher starts it as `python -m paceline_lens.watch.page_process FOLDER [PORT OF METRICS]`. The page has a button for the
stacks of all ranks: it sends SIGUSR1 to the launcher, which writes them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from paceline.base.errors import PacelineError
from paceline.base.terminal import say

_LAST_STATE_S = 1.5  # pages that are open get the last state within this time
_END_S = 60.0  # writing the report of a very large run takes some seconds


class PageProcess:
    """Starts the process, with the environment of the launcher, and ends it.

    Args:
        folder: the folder of the run's journal.
        metrics_port: where Prometheus finds the metrics, on the loopback address (0: a free port); None for no metrics.
    """

    def __init__(self, folder: Path, metrics_port: int | None = None) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "paceline_lens.watch.page_process", str(folder)]
        if metrics_port is not None:
            command.append(str(metrics_port))
        # Ctrl-C in a terminal signals all processes of the session. This process must outlive the launcher to write the report.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def end(self) -> None:
        """Ends the process after the run has ended, and waits for the report; prints an error if it was not written."""
        try:
            self._process.communicate(b"end\n", _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:
            shown = os.path.relpath(self._folder)
            code = self._process.returncode
            say(
                f"the page has ended with exit code {code}; `paceline watch {shown} --freeze report.html` writes the report"
            )


def main(arguments: list[str]) -> int:
    """Serves the page until the launcher ends; returns the exit code."""
    from paceline_lens.watch.following import FollowedRun
    from paceline_lens.watch.frozen import freeze_run
    from paceline_lens.watch.journal import JournalReader
    from paceline_lens.watch.metrics import MetricsServer
    from paceline_lens.watch.server import PageServer

    folder = Path(arguments[0])
    launcher = os.getppid()

    def write_stacks() -> None:
        # The launcher passes the signal on to all ranks. It would kill a rank that has no Accelerator yet.
        world = run.snapshot([])["world"]
        if os.getppid() == launcher and world["heard"] == world["procs"]:
            os.kill(launcher, signal.SIGUSR1)

    try:
        for port in arguments[1:]:
            metrics = MetricsServer(JournalReader(folder), int(port))
            say(f"metrics at {metrics.url}")
            threading.Thread(target=metrics.serve, daemon=True).start()
        run = FollowedRun(folder)
        with PageServer(run.snapshot, write_stacks=write_stacks) as server:
            say(f"the page of the run: {server.url}")
            sys.stdin.readline()
            report = freeze_run(folder)
            say(f"the page as it was at the end: {os.path.relpath(report)}")
            if server.publication.pages:
                time.sleep(_LAST_STATE_S)
    except PacelineError as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"could not write {error.filename or folder}: {error.strerror}")
        return 1
    return 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its end is the end of its input
    sys.exit(main(sys.argv[1:]))
