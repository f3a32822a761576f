"""The launcher for SLURM: it submits a job or, inside an allocation, starts a launcher on each node with one srun.

paceline launch --on slurm train.py
  outside of an allocation  submits a batch script with sbatch, which runs the same command within an allocation
  within an allocation      starts a launcher on each node with srun (`srun.py`). With --requeue, a run that has saved and
                            ended, or has lost a node, is queued again and resumes when it starts
  with --hostfile           starts the launchers on these hosts with srun
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline.base.exits import PREEMPTED
from paceline.base.terminal import say
from paceline.launch import host
from paceline.launch.job import Job
from paceline.launch.launcher import Handle, Hosts, Outcome, Rendered
from paceline.launch.processes.output import say_error
from paceline_hosts.assignment import assignment_of
from paceline_hosts.launchers.batch import PYTHON
from paceline_hosts.launchers.slurm import queue
from paceline_hosts.launchers.slurm.allocation import SlurmAllocation, allocation_of
from paceline_hosts.launchers.slurm.batch_script import batch_script, notices, settings_of_job, wanted
from paceline_hosts.launchers.slurm.srun import SrunStep

_OWN_ENDING = "RUNNING"  # the state of a job that neither SLURM nor the user is about to end


class SlurmLauncher:
    """Starts a job with sbatch or srun."""

    name = "slurm"
    hosts: Hosts = "either"

    def available(self) -> str:
        """Returns what is missing on this host; "" if nothing is."""
        missing = [name for name in ("srun", "sbatch", "scontrol") if shutil.which(name) is None]
        if not missing:
            return ""
        return f"there is no {' and no '.join(missing)} on this host; login nodes of a SLURM cluster have them"

    def placed(self, job: Job, env: Mapping[str, str]) -> Job:
        """Returns the job on the nodes of the allocation of this process; unchanged if there is no allocation.

        Raises:
            LaunchError: `slurm-nodes`, if the allocation has too few nodes.
        """
        allocation = allocation_of(env)
        if allocation is None:
            return job
        if job.nodes > len(allocation.nodes):
            raise too_few_nodes_error(job, allocation)
        slots = [replace(at, host=name) for at, name in zip(assignment_of(job).hosts, allocation.nodes, strict=False)]
        assignment = replace(assignment_of(job), hosts=tuple(slots), own_devices=True)
        return replace(job, assignment=assignment, allocation=allocation)

    def render(self, job: Job) -> Rendered:
        """Returns the batch script or, within an allocation or with a hostfile, the srun command that starts the launchers.

        Raises:
            ConfigError: `slurm-time`.
        """
        if job.allocation is None and assignment_of(job).settings.launch.hostfile is None:
            settings = settings_of_job(job)
            return Rendered(
                job, job.target.command, document=batch_script(job, settings), notices=notices(job, settings)
            )
        return Rendered(job, job.target.command, steps=(step_command(job),))

    def submit(self, rendered: Rendered) -> Handle:
        """Submits the job; or starts the launchers, which check the job on each node.

        Raises:
            LaunchError: `launch-hosts`; `launch-script`; those of `queue.submit`.
        """
        job = rendered.job
        if not rendered.document:
            return StepHandle(rendered)
        if job.target.kind == "script":
            host.check_target(job.target)  # a job may wait for hours before it could report this
        number = queue.submit(rendered.document, wanted(job), assignment_of(job).settings.variables)
        return QueuedHandle(number, assignment_of(job).settings.launch.wait is True)


class QueuedHandle:
    """A job in the queue of SLURM.

    Args:
        job: the number of the job.
        wait: whether to follow the job to its end.
    """

    def __init__(self, job: str, wait: bool) -> None:
        self._job = job
        self._wait = wait

    def wait(self) -> Outcome:
        """Follows the job to its end, or prints how to follow it.

        Raises:
            LaunchError: those of `queue.follow`.
        """
        if self._wait:
            return queue.follow(self._job)
        queue.tell(self._job)
        return Outcome(0)


class StepHandle:
    """The launchers on all nodes, which wait for the message to start."""

    def __init__(self, rendered: Rendered) -> None:
        self._job = rendered.job
        (command,) = rendered.steps
        # This variable makes srun put a number before each line, also before the answers of the launchers.
        environment.export({"SLURM_LABELIO": None})
        self._step = SrunStep(self._job, command)
        self._step.prepare()

    def wait(self) -> Outcome:
        """Runs the job to its end, and queues it again if that was asked for.

        Raises:
            LaunchError: `launch-host-lost`, `slurm-requeue`.
        """
        allocation = self._job.allocation
        # Hosts of a hostfile without an allocation are no job, and have no place in a queue.
        requeues = allocation is not None and bool(settings_of_job(self._job).requeue)
        try:
            code = self._step.wait().exit_code
        except LaunchError as error:
            # A run that has lost a node and is queued again goes on from its last checkpoint.
            if not requeues or error.code != "launch-host-lost":
                raise
            say_error(error)
            code = PREEMPTED
        if code == PREEMPTED and requeues:
            assert allocation is not None, "only a job has a place in the queue"
            put_back(allocation)
        return Outcome(code)


def step_command(job: Job) -> tuple[str, ...]:
    """Returns the srun that starts a launcher on each node."""
    hosts = assignment_of(job).hosts
    number = str(len(hosts))
    words = ["srun", "--nodes", number, "--ntasks", number, "--ntasks-per-node", "1"]
    words += ["-w", ",".join(host.host for host in hosts)]
    # These override settings of the site or the batch script that could end the launchers early, or close their input.
    words += ["--cpu-bind=none", "--export=ALL", "--input=all", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none"]
    if job.least:
        words.append("--no-kill")
    if job.allocation is not None and job.allocation.in_step:
        words.append("--overlap")  # the interactive shell is a step too, and holds all resources
    return (*words, *job.reach.args, *PYTHON)


def too_few_nodes_error(job: Job, allocation: SlurmAllocation) -> LaunchError:
    """Returns the error if more nodes are requested than the allocation has."""
    count = len(allocation.nodes)
    return LaunchError(
        "slurm-nodes",
        f"{job.nodes} nodes are requested, and job {allocation.job} has {count}.",
        why=f"its nodes are {', '.join(allocation.nodes)}",
        fix=f"use --nodes {count}, or remove it; or request more from SLURM (`#SBATCH --nodes={job.nodes}`)",
    )


def put_back(allocation: SlurmAllocation) -> None:
    """Queues a job again, unless SLURM does so by itself or somebody has cancelled it.

    Raises:
        LaunchError: `slurm-requeue`.
    """
    states = {record.state for record in queue.records(allocation.job)}
    if states != {_OWN_ENDING}:
        return
    problem = queue.requeue(allocation.job)
    if problem:
        raise LaunchError(
            "slurm-requeue", f"job {allocation.job} has saved, but SLURM does not queue it again.",
            f"SLURM says: {problem}", "submit it again: it resumes from its checkpoint",
        )  # fmt: skip
    say(f"job {allocation.job} is queued again (restart {allocation.restarts + 1})")


LAUNCHER = SlurmLauncher()
