"""What the launcher does about ranks that make no progress.

a signal has stopped a rank          the launcher prints one line, after a few seconds
SIGUSR1 reaches it or one of its     it reports the stacks of the ranks of all hosts: grouped on the terminal, and complete
ranks                                in a file
no rank makes progress               it makes the same report, once for each standstill, and then does what --on-hang says
(`world/hangs/progress.py`)

Of several nodes, the launcher that leads makes the report, and the others ask it for one (`OtherStacks`). While there is no
leader, a launcher reports the ranks of its own host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.base.terminal import say
from paceline.launch import host
from paceline.launch.job import Job
from paceline.launch.launcher import Failure
from paceline.launch.nodes import OtherStacks
from paceline.launch.processes.signals import Signals
from paceline.launch.processes.spawn import Worker
from paceline.launch.recording import LaunchRecording
from paceline.world.hangs.host import HostWatch, StackReport, report_of_places
from paceline.world.hangs.progress import LOOK_S
from paceline.world.stacks.report import RankPlace

_STOPPED_S = 5.0  # how long a rank must have been stopped before it is named
# Hosts notice a standstill within a few seconds of each other. A report that is not older than this was about the same one.
_SAME_STANDSTILL_S = 15.0


class StuckWatch:
    """Watches whether the ranks of this host make progress.

    Args:
        job: the job.
        folder: the folder with the files of the ranks.
        pause: waits for some seconds; messages of other nodes are served meanwhile.
        recording: the recording of the run.
        others: the stacks of other nodes; None where there are no other nodes.

    Attributes:
        failure: set when the run is stuck and must be ended.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        pause: Callable[[float], object],
        recording: LaunchRecording,
        others: OtherStacks | None,
    ) -> None:
        self._job = job
        self._folder = folder
        self._pause = pause
        self._recording = recording
        self._others = others
        self.begin()

    def begin(self) -> None:
        """Forgets the last round, and begins to watch the processes of a new one."""
        self._host = HostWatch(self._folder)
        self._looked_at = 0.0
        # The last report with other hosts, and when it was made.
        self._latest: tuple[float, StackReport] | None = None
        self._stopped: set[int] = set()  # process ids of ranks that were named
        self.failure: Failure | None = None

    @property
    def leaves(self) -> bool:
        """Whether this launcher ends because the run is stuck (`--on-hang leave`)."""
        return self.failure is not None and self._job.on_hang == "leave"

    def look(self, workers: list[Worker], signals: Signals) -> bool:
        """Makes the reports that are due. Returns whether the run must be ended."""
        now = time.monotonic()
        is_asked = signals.stacks_wanted or self._others_want_stacks
        if now - self._looked_at < LOOK_S and not is_asked:
            return False
        self._looked_at = now
        running = [worker for worker in workers if worker.poll() is None]
        if not running:
            if self._others is not None:
                # An empty answer keeps the leader from waiting for this host.
                self._others.answer([])
            return False
        self._name_stopped(running)
        if self._others is not None and self._others.is_wanted:
            self._answer(running, self._others)
        pids = [worker.pid for worker in running]
        is_asked = self._host.was_asked(pids) or signals.stacks_wanted
        headline = self._host.due(pids, is_asked)
        if is_asked:
            self._report(running, headline)
            # The launcher has passed the signal on to each rank. That was the same request, so it is taken back here.
            signals.stacks_wanted = False
            self._host.was_asked(pids)
            return False
        if headline:
            return self._act(running, headline)
        wanted = self._others.asked() if self._others is not None else ""
        if wanted:
            self._report(running, wanted)
        return False

    def _act(self, running: list[Worker], headline: str) -> bool:
        """Reports that the run is stuck. Returns whether it must be ended, and sets `failure` if so."""
        if self._latest is not None and time.monotonic() - self._latest[0] < _SAME_STANDSTILL_S:
            report = self._latest[1]
        else:
            report = self._report(running, headline)
        if self._job.on_hang == "report":
            return False
        # The rank that holds up the others may be on another host. Then the first rank of this host stands in for it.
        blamed = running[0]
        for worker in running:
            if worker.process.rank == report.blamed_rank:
                blamed = worker
        process = blamed.process
        self.failure = Failure(process.rank, process.local_rank, 0, blamed.pid, 1, time.time(), stuck=report.sentence)
        return True

    def _report(self, running: list[Worker], headline: str) -> StackReport:
        """Reports the ranks of all hosts, or asks the launcher that leads to do so. Returns what is known on this host."""
        notes = []
        others = self._others
        if others is not None and others.follows:
            leader = others.leader
            if others.ask_leader(headline):
                say(f"{leader} reports the stacks of all ranks: {headline}")
                return self._answer(running, others)
            notes.append(f"{leader} did not answer; the ranks of other hosts are missing here")
        asked = set[str]() if others is None else others.begin()
        places = self._places(running)
        of_others: list[RankPlace] = []
        if others is not None:
            of_others, missing = others.gather(asked)
            notes += missing
        if of_others:
            # Host names are only shown if there are several hosts.
            own_host = host.name()
            places = [replace(place, host=own_host) for place in places]
            places += of_others
        folder = self._recording.folder or Path(self._job.log_dir or "")
        report = report_of_places(places, headline, folder, notes)
        print(report.text, file=sys.stderr, flush=True)
        file = "" if report.file is None else str(report.file.absolute())
        # If all ranks are at the same place, none of them holds up the others, and this list is empty.
        blamed_ranks = list(report.blamed_ranks)
        self._recording.stuck(report.text, file, blamed_ranks)
        if asked:
            self._latest = time.monotonic(), report
        return report

    @property
    def _others_want_stacks(self) -> bool:
        return self._others is not None and self._others.is_wanted

    def _answer(self, running: list[Worker], others: OtherStacks) -> StackReport:
        """Sends the leader the stacks of this host. Returns a report of them alone, which is not printed."""
        places = self._places(running)
        others.answer(places)
        self._latest = time.monotonic(), report_of_places(places, "", None)
        return self._latest[1]

    def _places(self, running: list[Worker]) -> list[RankPlace]:
        pid_of_rank = {worker.process.rank: worker.pid for worker in running}
        return self._host.places(pid_of_rank, self._pause)

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
