"""`LauncherRecording`: what a launcher records of its run. Without a part that keeps records it records nothing."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.base.errors import LaunchError
from paceline.base.registry import Registry
from paceline.launch.job import Job
from paceline.launch.launcher import Outcome
from paceline.launch.rounds import Round

# A file of a journal that a process of this host writes. Launchers bring those of several hosts together.
OWN_FILE = re.compile(r"(rank|launcher)-(\d+)\.jsonl")

RECORDINGS = Registry("paceline.recordings", "recording of runs")


def recording_of(job: Job) -> LauncherRecording:
    """Returns what records a run of this launcher.

    Raises:
        ConfigError: `part-missing`, where a journal or metrics are asked for and no part has them.
    """
    if not RECORDINGS.names() and not job.watch and job.metrics_port is None:
        return LauncherRecording()
    recording: LauncherRecording = RECORDINGS.get("journal")(job)
    return recording


class LauncherRecording:
    """Takes what happens to a run in a launcher, and keeps nothing of it.

        begin -> [round -> failed] ... -> end

    Attributes:
        folder: of the journal; None before the first round, and of a run that is not watched.
    """

    folder: Path | None = None

    @property
    def env(self) -> dict[str, str]:
        """Environment variables for the ranks."""
        return {}

    def begin(self) -> None:
        """The run begins."""

    def round(self, decided: Round, index: int, *, leads: bool) -> None:
        """A round begins, whose processes are about to be started.

        Args:
            index: the number of this host in the round.
            leads: whether this launcher is the leader's.
        """

    def poll(self) -> None:
        """Called about ten times a second."""

    def failed(self, outcome: Outcome) -> None:
        """A round has failed."""

    def stuck(self, text: str, file: str, ranks: list[int]) -> None:
        """The stacks of the ranks were reported.

        Args:
            text: the stacks, with ranks at the same place in one group.
            file: the file with their stacks; "" where none could be written.
            ranks: the ranks for which the others wait; [] where that is not known.
        """

    def refused(self, error: LaunchError) -> None:
        """The launcher itself has failed."""

    def end(self, exit_code: int, why: str = "") -> None:
        """The launcher ends."""

    def close(self) -> None:
        """All lines of other hosts have come, and nothing more does."""
