"""What `paceline launch --on slurm` is told on top of the settings of all launchers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.kinds import matching
from paceline.config.settings import setting

_GROUP = "SLURM"


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of jobs that SLURM runs."""

    partition: str | None = setting(
        None,
        matching(r"\S+", "a name", "NAME"),
        "Partition that the job is submitted to; not set: the default one.",
        _GROUP,
    )


SETTINGS = SlurmSettings
