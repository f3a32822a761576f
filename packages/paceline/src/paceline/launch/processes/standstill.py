"""`StandstillWatch`: what a launcher does about ranks that make no progress. Without a part that watches them: nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.base.terminal import say
from paceline.launch.job import Job
from paceline.launch.launcher import Failure
from paceline.launch.nodes import OtherStacks
from paceline.launch.processes.signals import Signals
from paceline.launch.processes.spawn import Worker
from paceline.launch.recordings import LauncherRecording
from paceline.world.hang_reports import remedy, reports_for


class StandstillWatch:
    """Watches whether the ranks of this host make progress. This one says that a report which somebody wants needs a part.

    Args:
        others: the stacks of other nodes; None where there are no other nodes.

    Attributes:
        failure: set when the run is stuck and must be ended.
    """

    def __init__(self, others: OtherStacks | None) -> None:
        self.failure: Failure | None = None
        self._others = others

    @property
    def leaves(self) -> bool:
        """Whether this launcher ends because the run is stuck (`--on-hang leave`)."""
        return False

    def begin(self) -> None:
        """Forgets the last round, and begins to watch the processes of a new one."""

    def look(self, workers: list[Worker], signals: Signals) -> bool:
        """Makes the reports that are due. Returns whether the run must be ended."""
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
        return StandstillWatch(others)
    watch: StandstillWatch = reports.stuck_watch(job, folder, pause, recording, others)
    return watch
