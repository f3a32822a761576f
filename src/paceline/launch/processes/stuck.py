"""What the launcher does about ranks that make no progress.

a rank is stopped by a signal   one line, after a few seconds
SIGUSR1, here or at a rank      the stacks of all ranks of this host: grouped on the terminal, complete in a file
no progress (`world/hangs/progress.py`)  the same, once for each time; then what --on-hang says
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline.launch.launcher import Failure, Job
from paceline.launch.processes.output import say
from paceline.launch.processes.signals import Signals
from paceline.launch.processes.workers import Worker
from paceline.launch.recording import Recording
from paceline.world.stacks.watch import LOOK_S, HostWatch, Reported, report_on

_STOPPED_S = 5.0  # a rank that was stopped for so long is named


class StuckWatch:
    """Watches whether the ranks of this host make progress.

    Args:
        job: the job.
        folder: the folder with the files of the ranks.
        pause: waits for some seconds; messages of other nodes are served meanwhile.
        recording: the recording of the run.

    Attributes:
        failure: set when the run is stuck and must be ended.
    """

    def __init__(self, job: Job, folder: Path, pause: Callable[[float], object], recording: Recording) -> None:
        self._job = job
        self._folder = folder
        self._pause = pause
        self._recording = recording
        self.begin()

    def begin(self) -> None:
        """Begins with the processes of a new round."""
        self._host = HostWatch(self._folder)
        self._looked_at = 0.0
        self._is_reported = False
        self._stopped: set[int] = set()  # process ids of ranks that were named
        self.failure: Failure | None = None

    @property
    def leaves(self) -> bool:
        """Whether this launcher ends because the run is stuck (`--on-hang leave`)."""
        return self.failure is not None and self._job.on_hang == "leave"

    def look(self, workers: list[Worker], signals: Signals) -> bool:
        """Makes the reports that are due. Returns whether the run must be ended."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_S and not signals.stacks_wanted:
            return False
        self._looked_at = now
        running = [worker for worker in workers if worker.poll() is None]
        pids = [worker.pid for worker in running]
        self._name_stopped(running)
        if self._host.was_asked(pids) or signals.stacks_wanted:
            self._report(running, self._host.headline(pids))
            # The launcher has passed the signal on to each rank. That was the same request, so it is taken back here.
            signals.stacks_wanted = False
            self._host.was_asked(pids)
        stuck_s = self._host.stuck_for(pids)
        if not stuck_s:
            self._is_reported = False
        elif not self._is_reported:
            self._is_reported = True
            return self._act(running, stuck_s)
        return False

    def _act(self, running: list[Worker], stuck_s: float) -> bool:
        headline = self._host.headline([worker.pid for worker in running], stuck_s)
        reported = self._report(running, headline)
        if self._job.on_hang == "report":
            return False
        blamed = next(worker for worker in running if worker.process.rank == reported.blamed_rank)
        process = blamed.process
        self.failure = Failure(process.rank, process.local_rank, 0, blamed.pid, 1, time.time(), stuck=reported.sentence)
        return True

    def _report(self, running: list[Worker], headline: str) -> Reported:
        pid_of_rank = {worker.process.rank: worker.pid for worker in running}
        folder = self._recording.folder or Path(self._job.log_dir or "")
        reported = report_on(self._host, pid_of_rank, headline, folder, self._pause)
        print(reported.text, file=sys.stderr, flush=True)
        file = "" if reported.file is None else str(reported.file.absolute())
        ranks = list(reported.blamed_ranks)
        self._recording.stuck(reported.text, file, ranks)
        return reported

    def _name_stopped(self, running: list[Worker]) -> None:
        """Prints which ranks a signal has stopped, because the other ranks only wait for them."""
        for worker in running:
            seconds = worker.frozen_s()
            if not seconds:
                self._stopped.discard(worker.pid)
            elif seconds > _STOPPED_S and worker.pid not in self._stopped:
                self._stopped.add(worker.pid)
                say(
                    f"rank {worker.process.rank} (pid {worker.pid}) is stopped by a signal (SIGSTOP or SIGTSTP; state T), and "
                    f"the others wait for it. `kill -CONT {worker.pid}` lets it go on; it is killed after "
                    f"{self._job.timeout_s:g} s (--timeout-s)"
                )
