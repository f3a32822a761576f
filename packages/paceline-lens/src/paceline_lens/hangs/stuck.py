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
from functools import partial
from pathlib import Path

from paceline.base.terminal import say
from paceline.launch.job import Job
from paceline.launch.launcher import Failure
from paceline.launch.nodes import GatheredPlaces, OtherStacks
from paceline.launch.processes.signals import Signals
from paceline.launch.processes.spawn import Worker
from paceline.launch.processes.standstill import StandstillWatch
from paceline.launch.recordings import LauncherRecording
from paceline.world.stacks.parse import RankPlace
from paceline_lens.hangs.host import ASKED, HostWatch, report
from paceline_lens.hangs.progress import LOOK_S
from paceline_lens.hangs.stack_report import blamed, grouped, in_one_sentence

_STOPPED_S = 5.0  # how long a rank must have been stopped before it is named
# Hosts notice a standstill within a few seconds of each other. A report that is not older than this was about the same one.
_SAME_STANDSTILL_S = 15.0


class StuckWatch(StandstillWatch):
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
        recording: LauncherRecording,
        others: OtherStacks | None,
    ) -> None:
        super().__init__(others)
        self._job = job
        self._folder = folder
        self._pause = pause
        self._recording = recording
        self.begin()

    def begin(self) -> None:
        """Forgets the last round, and begins to watch the processes of a new one."""
        self._host = HostWatch(self._folder)
        self._looked_at = 0.0
        # Where ranks were at the last standstill that was reported with other hosts, and when that was.
        self._places_of_standstill: list[RankPlace] = []
        self._standstill_at = 0.0
        self._stopped: set[int] = set()  # process ids of ranks that were named
        self.failure = None

    @property
    def leaves(self) -> bool:
        """Whether this launcher ends because the run is stuck (`--on-hang leave`)."""
        return self.failure is not None and self._job.on_hang == "leave"

    def look(self, workers: list[Worker], signals: Signals) -> bool:
        """Makes the reports that are due. Returns whether the run must be ended."""
        now = time.monotonic()
        wanted = self._others.wanted() if self._others is not None else ""
        if now - self._looked_at < LOOK_S and not signals.stacks_wanted and not wanted:
            return False
        self._looked_at = now
        running = [worker for worker in workers if worker.poll() is None]
        if self._others is not None and wanted:
            # Without running processes this is an empty answer, which keeps the leader from waiting for this host.
            places = self._places(running)
            self._others.answer(places)
            self._remember(wanted, places)
        if not running:
            return False
        self._name_stopped(running)
        headline = self._host.due([worker.pid for worker in running], signals.stacks_wanted)
        if headline == ASKED:
            self._report(running, headline)
            # The launcher has passed the signal on to each rank. That was the same request, so it is taken back here.
            signals.stacks_given()
            self._host.was_asked(worker.pid for worker in running)
        elif headline:
            return self._act(running, headline)
        elif self._others is not None and (headline := self._others.asked()):
            self._report(running, headline)
        return False

    def _act(self, running: list[Worker], headline: str) -> bool:
        """Reports that the run is stuck. Returns whether it must be ended, and sets `failure` if so."""
        places = self._places_of_standstill
        if not places or time.monotonic() - self._standstill_at > _SAME_STANDSTILL_S:
            places = self._report(running, headline)
        if self._job.on_hang == "report":
            return False
        groups = grouped(places)
        # The ranks that hold up the others may be on another host. Then the first rank of this host stands in for them.
        worker = min(running, key=lambda worker: worker.process.rank not in blamed(groups))
        process = worker.process
        sentence = in_one_sentence(groups)
        self.failure = Failure(process.rank, process.local_rank, 0, worker.pid, 1, time.time(), stuck=sentence)
        return True

    def _report(self, running: list[Worker], headline: str) -> list[RankPlace]:
        """Reports the ranks of all hosts, or asks the launcher that leads to do so. Returns the ranks that are known here."""
        own = partial(self._places, running)
        if self._others is None:
            gathered = GatheredPlaces(own())
        else:
            gathered = self._others.gather(headline, own)
            self._remember(headline, gathered.places)
        if gathered.reporter:
            say(f"{gathered.reporter} reports the stacks of all ranks: {headline}")
            return gathered.places
        folder = self._recording.folder or Path(self._job.log_dir or "")
        text, file = report(gathered.places, headline, folder, gathered.notes)
        print(text, file=sys.stderr, flush=True)
        self._recording.stuck(text, "" if file is None else str(file.absolute()), blamed(grouped(gathered.places)))
        return gathered.places

    def _remember(self, headline: str, places: list[RankPlace]) -> None:
        """Keeps where the ranks are, if this is about a standstill that this host notices later than another one."""
        # A report that somebody has asked for is about no standstill: its ranks may be at work.
        if headline != ASKED:
            self._standstill_at = time.monotonic()
            self._places_of_standstill = places

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
