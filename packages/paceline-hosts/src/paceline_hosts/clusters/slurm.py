"""Settings that `paceline launch --on slurm` takes in addition to those of all launchers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.kinds import YES_NO, matching, seconds, whole
from paceline.config.settings import setting

_GROUP = "SLURM"


@dataclass(frozen=True)
class SlurmSettings:
    """Settings of jobs that SLURM runs."""

    partition: str | None = setting(
        None, matching(r"\S+", "a name", "NAME"), "Partition for the job; not set: the default one.",
        _GROUP,
    )  # fmt: skip
    account: str | None = setting(
        None, matching(r"\S+", "a name", "NAME"), "Account for the job; not set: the default one.", _GROUP,
    )  # fmt: skip
    time: str | None = setting(
        None, matching(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}", "a time such as 90, 2:00:00 or 1-12", "[DAYS-]H:MM:SS"),
        "Time limit of the job, as in SLURM (a plain number means minutes); not set: that of the partition.", _GROUP,
    )  # fmt: skip
    cpus_per_proc: int | None = setting(
        None, whole(1), "CPUs to request from SLURM for each process; not set: the value of threads, or 1.", _GROUP
    )
    sbatch_args: str = setting(
        "", matching(r".*", "words, quoted as one", "WORDS"),
        "Further arguments of sbatch, such as --sbatch-args='--qos=high --array=0-3'; they override other settings.", _GROUP,
    )  # fmt: skip
    requeue: bool | None = setting(
        None, YES_NO,
        "Puts the job back into the queue when it has saved and ended (exit code 75), or has lost a node; not set: yes for "
        "a job that this command submits, no in an allocation.", _GROUP,
    )  # fmt: skip
    warning_s: float | None = setting(
        None, seconds(),
        "Seconds before the time limit at which the processes are asked to save (SLURM may be 60 s early); not set: grace_s "
        "plus 60, at most half of time.", _GROUP,
    )  # fmt: skip


SETTINGS = SlurmSettings
