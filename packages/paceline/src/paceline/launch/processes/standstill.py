"""What a launcher does about ranks that make no progress, where no part is installed that watches them: nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from paceline.base.terminal import say
from paceline.launch.job import Job
from paceline.launch.launcher import Failure
from paceline.launch.nodes import OtherStacks
from paceline.launch.processes.signals import Signals
from paceline.launch.processes.spawn import Worker
from paceline.launch.recordings import LauncherRecording
from paceline.world.hang_reports import remedy, reports_for


class StandstillWatch(Protocol):
    """Watches whether the ranks of this host make progress.

    Attributes:
        failure: set when the run is stuck and must be ended.
    """

    failure: Failure | None

    @property
    def leaves(self) -> bool:
        """Whether this launcher ends because the run is stuck (`--on-hang leave`)."""
        ...

    def begin(self) -> None:
        """Forgets the last round, and begins to watch the processes of a new one."""
        ...

    def look(self, workers: list[Worker], signals: Signals) -> bool:
        """Makes the reports that are due. Returns whether the run must be ended."""
        ...


class NobodyWatches:
    """Stands for the watch of a launcher without reports."""

    leaves = False

    def __init__(self, others: OtherStacks | None) -> None:
        self.failure: Failure | None = None
        self._others = others

    def begin(self) -> None:
        """See `StandstillWatch`."""

    def look(self, workers: list[Worker], signals: Signals) -> bool:
        """Says that a report which somebody asks for needs a part."""
        if self._others is not None and self._others.wanted():
            self._others.answer([])
        if signals.stacks_wanted:
            signals.stacks_given()
            say(f"the stacks of the ranks are not collected: {remedy()}")
        return False


def standstill_watch(
    job: Job, folder: Path, pause: Callable[[float], object], recording: LauncherRecording, others: OtherStacks | None
) -> StandstillWatch:
    """Makes what watches the ranks of this host.

    Args:
        job: the job.
        folder: the folder with the files of the ranks.
        pause: waits for some seconds; messages of other nodes are served meanwhile.
        recording: the recording of the run.
        others: the stacks of other nodes; None where there are no other nodes.

    Raises:
        ConfigError: `part-missing`, where `--on-hang` asks for more than a report and no part makes any.
    """
    reports = reports_for(job.on_hang != "report")
    if reports is None:
        return NobodyWatches(others)
    watch: StandstillWatch = reports.stuck_watch(job, folder, pause, recording, others)
    return watch
