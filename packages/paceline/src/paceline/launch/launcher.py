"""The data of a launch: what to run (`Job`), the exact commands (`Rendered`), the result (`Outcome`), and `Launcher` itself.

    Job --render (pure)--> Rendered --submit--> Handle --wait--> Outcome

A launcher is one file or package of `launchers/` that defines `LAUNCHER`.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from paceline.base.exits import STUCK
from paceline.base.registry import Registry

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
JOBS_ELSEWHERE = Registry("paceline.jobs_elsewhere", "start of processes on")
# Variable that a scheduler sets within an allocation -> function (settings, environment) -> settings, completed by that.
ALLOCATIONS = Registry("paceline.allocations", "allocation")


@dataclass(frozen=True)
class Target:
    """What each process runs: a script, a module, a program, or a function.

    Attributes:
        kind: "script", "module", "program" or "function".
        name: the path of the script, the name of the module, the program; for a function, its name in messages.
        args: the arguments.
        function: for the kind "function": called without arguments in each process. The value that it returns on rank 0
            becomes `Outcome.value`.
        local_rank: whether each process gets `--local_rank=N` before its arguments.
    """

    kind: str
    name: str
    args: tuple[str, ...] = ()
    function: Callable[[], Any] | None = None
    local_rank: bool = False

    def on(self, local_rank: int) -> Target:
        """Returns the target of the process with this local rank."""
        if not self.local_rank:
            return self
        return replace(self, args=(f"--local_rank={local_rank}", *self.args))

    @property
    def command(self) -> tuple[str, ...]:
        """The command line that starts it."""
        python = {"script": (sys.executable,), "module": (sys.executable, "-m")}.get(self.kind, ())
        return (*python, self.name, *self.args)


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached.

    Attributes:
        port: the port of sshd; None for the default of ssh.
        args: more arguments for the program that connects to them.
        activate: a shell script that each host sources first; "" for none.
        timeout_s: how long a host may take to answer.
    """

    port: int | None = None
    args: tuple[str, ...] = ()
    activate: str = ""
    timeout_s: float = 120.0


class HostSlots(Protocol):
    """A host, and the numbers of its slots: one process for each."""

    @property
    def host(self) -> str: ...

    @property
    def ids(self) -> tuple[int, ...]: ...


class OnHosts(Protocol):
    """What a job on other hosts is to the core: the hosts in the order of their ranks, and the variables that go along."""

    @property
    def hosts(self) -> tuple[HostSlots, ...]: ...

    @property
    def env(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Job:
    """What is to run, where, and how it is watched.

    Attributes:
        target: what each process runs.
        procs: processes on each node.
        nodes, least: how many nodes take part at most and at least; `least` is 0 for a fixed number.
        node_rank: the number of this node.
        numbered: whether the user has numbered the nodes; if not, the order of joining decides.
        main_address, main_port: where node 0 listens (several addresses joined by commas); port 0 for a free port, on one
            node.
        start: "fork" to copy a parent that has imported torch, or "exec" for fresh processes.
        env: variables for all processes, in addition to the environment of the launcher.
        max_restarts: how often all processes are started again after a failure.
        grace_s: seconds that processes have to save and end after they were asked to.
        monitor_interval_s: seconds between two checks of the processes.
        timeout_s: seconds that a collective may take. A stopped process is killed after this time.
        log_dir: directory for the output of each process; None for the terminal alone.
        tee: by local rank, streams that the launcher copies to the terminal (and to log_dir's files, where there are
            any): 1 stdout, 2 stderr, 3 both. None leaves the terminal to the processes.
        ranks: the ranks whose output is shown on the terminal; None for all.
        mark: the prefix of each copied line; ${rank} and ${local_rank} are replaced.
        backend, options: the rendezvous backend and its options.
        compat: libraries whose names are served to the script, joined by commas; "" for none.
        cores: cores of this node that are divided among its processes; () leaves each process all of them.
        core_files: whether a process that crashes leaves a core file, which the launcher then reads.
        on_hang: what happens to a run that is stuck, after the report: "report" (nothing), "restart" or "leave".
        assignment, reach: for a job on other hosts: what they run, and how they are reached.
        cluster: the settings of the launcher itself, an object of its class in `config/clusters`; None if it has none.
        store: the URL of a store outside the nodes (`network/store_link.py` of the extra hosts); "" for none.
        tls: whether launchers use TLS: "no", "yes", or files joined by commas (`network/tls.py`).
        secret: by which the launchers of several nodes recognise each other; "" for that of the user (`network/secret.py`).
        watch: the folder for the journal of a watched run; `recording.NEW_FOLDER` for a new one, "" for no journal.
        metrics_port: the port where the first host serves metrics to Prometheus; None for no metrics.
        allocation: what a scheduler has given to this process, an object of its launcher; None for nothing.
    """

    target: Target
    procs: int = 1
    nodes: int = 1
    least: int = 0
    node_rank: int = 0
    numbered: bool = True
    main_address: str = "127.0.0.1"
    main_port: int = 0
    start: str = "fork"
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    grace_s: float = 30.0
    monitor_interval_s: float = 0.1
    timeout_s: float = 600.0
    log_dir: str | None = None
    tee: Mapping[int, int] | None = None
    ranks: frozenset[int] | None = None
    mark: str = "[rank${rank}]: "
    backend: str = "static"
    options: Mapping[str, str] = field(default_factory=dict)
    compat: str = ""
    cores: tuple[int, ...] = ()
    core_files: bool = False
    on_hang: str = "report"
    assignment: OnHosts | None = None
    reach: Reach = Reach()
    cluster: Any = None
    store: str = field(default="", repr=False)  # it may hold a password
    tls: str = "no"
    secret: str = field(default="", repr=False)
    watch: str = ""
    metrics_port: int | None = None
    allocation: Any = None


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
