"""`Launcher`, and what it makes of a `Job`: the exact commands (`Rendered`), a `Handle` on what runs, the result (`Outcome`).

    Job --render (pure)--> Rendered --submit--> Handle --wait--> Outcome

A launcher is one file or package of `launchers/` that defines `LAUNCHER`.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from paceline.base.exits import STUCK
from paceline.base.registry import Registry
from paceline.launch.job import Job, OnHosts

LAUNCHERS = Registry(
    "paceline.launchers",
    "launcher",
    nicknames={
        "k8s": "kubernetes",
        "kube": "kubernetes",
        "sbatch": "slurm",
        "srun": "slurm",
        "mpi": "openmpi",
        "mpirun": "openmpi",
    },
)
# "hosts" -> function as `paceline_hosts.hosts.job_on_hosts`, which makes the job of settings that name other hosts.
JOBS_ELSEWHERE = Registry("paceline.jobs_elsewhere", "way to start processes on other hosts")
# Variable that a scheduler sets within an allocation -> function (settings, environment) -> settings, completed by that.
ALLOCATIONS = Registry("paceline.allocations", "allocation")


@dataclass(frozen=True)
class Process:
    """One process of a job: its row in the world table, its variables and its cores, if any are bound."""

    rank: int
    local_rank: int
    env: Mapping[str, str]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """A job with its exact commands, before anything is started.

    Attributes:
        job: the job.
        command: the command line of each process.
        processes: the processes of this node.
        steps: for a job on other hosts: the commands that this host runs to start it.
        document: what a cluster is given, such as a batch script or a manifest; "" for none. `--dry-run` prints it.
        notices: what the user should know of it before it is submitted.
    """

    job: Job
    command: tuple[str, ...]
    processes: tuple[Process, ...] = ()
    steps: tuple[tuple[str, ...], ...] = ()
    document: str = ""
    notices: tuple[str, ...] = ()

    def text(self, host: str = "this host") -> str:
        """What `--dry-run` prints: the command, the environment, and the world table."""
        job = self.job
        if job.assignment is not None:
            return self._text_on(job.assignment)
        nodes = f"{job.least} to {job.nodes}" if job.least else str(job.nodes)
        lines = [
            f"command: {shlex.join(self.command)}",
            f"start:   {job.start}, {job.procs} on each of {nodes} nodes, "
            f"up to {job.max_restarts} restarts, rendezvous {job.backend}",
            "",
            "environment of every process:",
        ]
        shared = set.intersection(*(set(process.env.items()) for process in self.processes))
        for name, value in sorted(shared):
            is_chosen_later = name == "MASTER_PORT" and not job.main_port
            note = "  (a free one is found at the start)" if is_chosen_later else ""
            lines.append(f"  {name}={shlex.quote(value)}{note}")
        lines += ["", _TABLE_HEAD]
        for process in self.processes:
            lines.append(_table_row(process.rank, process.local_rank, job.node_rank, host))
        if job.nodes > 1:
            lines.append(f"      and those of the other {job.nodes - 1} nodes, found when they meet")
        return "\n".join(lines)

    def _text_on(self, assignment: OnHosts) -> str:
        """Returns the text for a job on other hosts. Values of variables are not shown, because they may be secrets."""
        lines = [f"command: {shlex.join(self.command)}", "", "started by:"]
        lines += [f"  {shlex.join(step)}" for step in self.steps]
        names = ", ".join(assignment.env) or "none"
        lines += ["", f"variables that go along: {names}", "", _TABLE_HEAD]
        rank = 0
        for node, slots in enumerate(assignment.hosts):
            for local_rank in range(len(slots.ids)):
                lines.append(_table_row(rank, local_rank, node, slots.host))
                rank += 1
        return "\n".join(lines)


_TABLE_HEAD = "rank  local rank  node  host"


def _table_row(rank: int, local_rank: int, node: int, host: str) -> str:
    return f"{rank:>4}  {local_rank:>10}  {node:>4}  {host}"


@dataclass(frozen=True)
class Failure:
    """How the first failing process ended.

    Attributes:
        rank, local_rank, node, pid: the process.
        code: its exit code, or the negative number of the signal that ended it.
        at: the time of the failure (seconds since the epoch).
        report: its traceback; "" for none.
        later: a line for each process that failed afterwards.
        waiting: the ranks that failed because this rank ended without an error while they waited for it.
        stuck: where all ranks were, if the run was ended because none made progress; "" otherwise.
    """

    rank: int
    local_rank: int
    node: int
    pid: int
    code: int
    at: float = 0.0
    report: str = ""
    later: tuple[str, ...] = ()
    waiting: tuple[int, ...] = ()
    stuck: str = ""

    @property
    def what(self) -> str:
        """What happened, in one sentence."""
        if self.stuck:
            return f"no rank made progress: {self.stuck}."
        if self.waiting:
            others = f"rank{'s' * (len(self.waiting) > 1)} {', '.join(map(str, self.waiting))}"
            return f"rank {self.rank} left with exit code {self.code} while {others} still waited for it."
        if self.code >= 0:
            return f"rank {self.rank} failed with exit code {self.code}."
        try:
            name = signal.Signals(-self.code).name
        except ValueError:  # real-time signals have none
            name = f"signal {-self.code}"
        return f"rank {self.rank} was ended by {name}."

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it: 128 + N if signal N ended the process."""
        if self.stuck:
            return STUCK
        if self.waiting:
            return 1  # its own exit code is 0
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True)
class Outcome:
    """The result of a job on this node.

    Attributes:
        exit_code: 0 for success; `PREEMPTED` if the processes were asked to end and have saved.
        failure: the first failure of the last round on this node; None for none.
        elsewhere: the first failure, if it was on another node.
        restarts: how often the processes were started again.
        value: the value that a function returned on rank 0.
        in_worker: whether this is a worker process at the end of its script, which must print nothing and end.
    """

    exit_code: int
    failure: Failure | None = None
    elsewhere: str = ""
    restarts: int = 0
    value: Any = None
    in_worker: bool = False

    @property
    def reason(self) -> str:
        """The first failure, in a sentence; "" for no failure."""
        if self.elsewhere:
            return self.elsewhere
        return self.failure.what if self.failure is not None else ""


class Handle(Protocol):
    """A job that was submitted."""

    def wait(self) -> Outcome:
        """Waits until all its processes have ended."""
        ...


# Where a launcher starts processes: on this host, on the hosts that a hostfile has "named", or on hosts that it has "chosen"
# itself, as the scheduler of a cluster does. "either" means the hosts of a hostfile if there is one, else chosen hosts.
Hosts = Literal["this", "named", "chosen", "either"]


class Launcher(Protocol):
    """A way to start processes.

    A launcher may also have a method `placed(job, env) -> Job`, which puts the job on hosts that a scheduler has given to this
    process.

    Attributes:
        name: its name for `--on`.
        hosts: on which hosts it starts processes.
    """

    name: str
    hosts: Hosts

    def available(self) -> str:
        """ "" if it can be used here, else the reason why not."""
        ...

    def render(self, job: Job) -> Rendered:
        """Makes the exact commands of a job. It is pure: it starts nothing, and reads nothing but the job."""
        ...

    def submit(self, rendered: Rendered) -> Handle:
        """Checks the job, and starts it or gives it to a cluster."""
        ...
