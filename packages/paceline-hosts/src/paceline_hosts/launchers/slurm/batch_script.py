"""Writes the batch script that `paceline launch --on slurm` submits: the request for resources, and the same command.

Inside the allocation that command starts one launcher on each node (`srun.py`). The functions here are pure. The script
contains no secret, because each start of the job creates a new one.
"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import PurePath

from paceline.base.errors import ConfigError
from paceline.base.version import VERSION
from paceline.config.settings import settings_of
from paceline.launch.job import Job
from paceline_hosts.assignment import Assignment, assignment_of
from paceline_hosts.clusters.slurm import SlurmSettings
from paceline_hosts.launchers.launch_flags import flags_of

_SIGNAL_LATE_S = 60.0  # SLURM sends the warning up to this much earlier than it was asked to
# Settings that request resources; `wanted` lists them.
_ASKED_FOR = {"nodes", "procs", "partition", "account", "time", "gpus_per_node", "cpus_per_proc", "sbatch_args"}
# Settings of the submission, which the command in the allocation does not get as flags.
_OF_SUBMISSION = {
    "launcher",
    "wait",
    "dry_run",
    "config",
    "nodes",
    "procs",
    "gpus_per_node",
    *settings_of(SlurmSettings),
}


def batch_script(job: Job, settings: SlurmSettings) -> str:
    """Returns the text of the script.

    Args:
        job: the job; the script requests its nodes, and CPUs for its processes.
        settings: what else is requested from SLURM.

    Raises:
        ConfigError: `slurm-time`, if the warning would come before the job has started.
    """
    assignment = assignment_of(job)
    nodes = f"{job.least}-{job.nodes}" if job.least else str(job.nodes)
    requeue = settings.requeue is not False
    words = [f"--job-name={PurePath(job.target.name).stem}", f"--nodes={nodes}"]
    if job.least:
        words.append("--no-kill")  # the nodes that are left go on
    else:
        words.append("--ntasks-per-node=1")  # with a range SLURM would give no more nodes than the least
    words.append(f"--cpus-per-task={cpus_of(job, settings)}")
    gpus = assignment.settings.launch.gpus_per_node
    asked = {"partition": settings.partition, "account": settings.account, "time": settings.time}
    words += [f"--{name}={value}" for name, value in asked.items() if value is not None]
    if gpus:
        words.append(f"--gpus-per-node={gpus}")
    # `B:` sends the signal to the batch script alone. It is the launcher, and asks each process once to save.
    words.append(f"--signal=B:TERM@{warning_s(job, settings):.0f}")
    words += ["--requeue" if requeue else "--no-requeue", "--open-mode=append"]
    more = shlex.split(settings.sbatch_args)
    is_array = any(word.startswith(("--array", "-a")) for word in more)
    folder = assignment.cwd.replace("%", "%%")  # SLURM replaces patterns that begin with %
    number = "%A_%a" if is_array else "%j"  # the job and the element of an array, or the job
    log = PurePath(folder, f"paceline-{number}.log")
    words.append(f"--output={log}")
    options = [[word] for word in words]
    options += _options(more)
    directives = [f"#SBATCH {shlex.join(option)}" for option in options]
    command = shlex.join(command_in_allocation(assignment, job, requeue))
    about = f"# Written by paceline {VERSION}. Exit code 75: the run has saved; with --requeue the job goes back to the queue."
    return "\n".join(["#!/bin/bash", *directives, about, f"exec {command}"]) + "\n"


def notices(job: Job, settings: SlurmSettings) -> tuple[str, ...]:
    """Returns what is easily forgotten: without a request for GPUs a job waits for its nodes, and then runs on their CPUs."""
    asks_for_gpus = assignment_of(job).settings.launch.gpus_per_node or "gpu" in settings.sbatch_args
    if asks_for_gpus or assignment_of(job).settings.run.cpu:
        return ()
    return (
        f"no GPU is requested; `--gpus {job.procs}` requests {job.procs} on each node, `--cpu` says that none is needed.",
    )


def settings_of_job(job: Job) -> SlurmSettings:
    """Returns the settings of SLURM of a job."""
    assert isinstance(job.cluster, SlurmSettings), "a job of SLURM's has its settings"
    return job.cluster


def wanted(job: Job) -> list[str]:
    """Returns what is requested from SLURM, each value with its source."""
    settings = settings_of_job(job)
    rows = []
    for row in assignment_of(job).settings.decisions:
        if row.field in _ASKED_FOR and row.source != "default":
            rows.append(f"{row.field}={row.value} ({row.where})")
    return [*rows, f"CPUs of each node: {cpus_of(job, settings)}"]


def cpus_of(job: Job, settings: SlurmSettings) -> int:
    """Returns the number of CPUs that are requested on each node."""
    threads = assignment_of(job).settings.launch.threads
    return job.procs * (settings.cpus_per_proc or threads or 1)


def warning_s(job: Job, settings: SlurmSettings) -> float:
    """Returns how many seconds before the time limit the processes are asked to save.

    Raises:
        ConfigError: `slurm-time`.
    """
    limit_s = math.inf
    if settings.time is not None:
        limit_s = seconds_of(settings.time)
    chosen = settings.warning_s
    if chosen is None:
        # Of a short job at most half the time goes to saving.
        return math.floor(min(job.grace_s + _SIGNAL_LATE_S, limit_s / 2))
    if chosen >= limit_s:
        raise ConfigError(
            "slurm-time",
            "the processes would be asked to save before they have begun.",
            why=f"time={settings.time} ({limit_s:.0f} s); warning_s={chosen:g}",
            fix="give a longer --time, or a shorter --warning-s",
        )
    return chosen


def seconds_of(time: str) -> float:
    """Returns SLURM's time in seconds: MINUTES, MINUTES:SECONDS, H:MM:SS, DAYS-H, DAYS-H:MM or DAYS-H:MM:SS."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # With days, or with three parts, the first part is hours. One or two parts without days begin with minutes.
    units = (3600, 60, 1)
    if not dash and len(parts) < 3:
        units = (60, 1, 0)
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return float(seconds + int(days or 0) * 86_400)


def command_in_allocation(assignment: Assignment, job: Job, requeue: bool) -> tuple[str, ...]:
    """Returns the command of the script: `paceline launch` with the settings as merged here, so that no file is read again."""
    words = [sys.executable, "-m", "paceline", "launch", "--on", "slurm", "--procs", str(job.procs)]
    if job.least:
        words += ["--nodes", f"{job.least}:{job.nodes}"]
    words.append("--requeue" if requeue else "--no-requeue")
    return (*words, *flags_of(assignment.settings, _OF_SUBMISSION), assignment.script, *assignment.args)


def _options(words: list[str]) -> list[list[str]]:
    """Groups words for sbatch into options, each with its value if that is a separate word, for one line each."""
    options: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not options:
            options.append([word])
        else:
            options[-1].append(word)
    return options
