"""The nouns of launching: what is to run (`Job`), exactly how (`Rendered`), what comes of it (`Outcome`), and by whom.

    Job --render (pure)--> Rendered --submit--> Handle --wait--> Outcome

A launcher is one file or package of `launchers/` that defines `LAUNCHER`.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.base.exits import STUCK
from paceline.base.registry import Registry

if TYPE_CHECKING:
    from paceline.launch.launchers.slurm.allocation import Allocation
    from paceline.launch.remote.assignment import Assignment

LAUNCHERS = Registry("paceline.launch.launchers", "LAUNCHER", "paceline.launchers")


@dataclass(frozen=True)
class Target:
    """What each process runs: a script, a module, a program, or a function.

    Attributes:
        kind: "script", "module", "program" or "function".
        name: the script's path, the module's name, the program; of a function, what to call it in messages.
        args: the words after it on the command line.
        function: called without arguments in each process, where `kind` is "function"; what it returns on rank 0
            becomes the outcome's value.
        local_rank: whether each process finds `--local_rank=N` before its arguments.
    """

    kind: str
    name: str
    args: tuple[str, ...] = ()
    function: Callable[[], Any] | None = None
    local_rank: bool = False

    def on(self, local_rank: int) -> Target:
        """What the process of this local rank runs."""
        if not self.local_rank:
            return self
        return replace(self, args=(f"--local_rank={local_rank}", *self.args))

    @property
    def command(self) -> tuple[str, ...]:
        """The words with which one would start it by hand."""
        python = {"script": (sys.executable,), "module": (sys.executable, "-m")}.get(self.kind, ())
        return (*python, self.name, *self.args)


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached.

    Attributes:
        port: of their sshds; None for what ssh knows itself.
        args: more words for the program that reaches them.
        activate: a shell script to be sourced there first; "" for none.
        timeout_s: how long a host may take to answer.
    """

    port: int | None = None
    args: tuple[str, ...] = ()
    activate: str = ""
    timeout_s: float = 120.0


@dataclass(frozen=True)
class Job:
    """What is to run, where, and how it is watched.

    Attributes:
        target: what each process runs.
        procs: processes on each node.
        nodes, least: how many nodes take part, and how few may; 0 where none can be done without.
        node_rank: which one this is.
        numbered: whether the nodes have such numbers; if not, they are taken in the order of their coming.
        main_address, main_port: where a run is found (several joined by commas): node 0 listens there; port 0 for a free
            one, on one node.
        start: how processes begin: "fork" from a parent that has imported torch, or "exec" as fresh ones.
        env: variables for all processes, on top of the launcher's own environment.
        max_restarts: how often all processes are started again after a failure.
        grace_s: seconds that processes have to save and leave, once they are asked to end.
        monitor_interval_s: seconds between two looks at the processes.
        timeout_s: seconds that a collective may take, and so a process may stand still.
        log_dir: directory for the output of each process; None for the terminal alone.
        tee: by local rank, streams that the launcher copies to the terminal (and to log_dir's files, where there are
            any): 1 stdout, 2 stderr, 3 both. None leaves the terminal to the processes.
        ranks: whose output reaches the terminal, by rank; None for everybody's.
        mark: what stands before each copied line, with ${rank} and ${local_rank} filled in.
        backend, options: how several nodes find each other, and what that backend is told.
        compat: libraries whose names are served to the script, joined by commas; "" for none.
        cores: cores of this node that are divided among its processes; () leaves each process all of them.
        core_files: whether a process that crashes leaves a core file, which is then read.
        on_hang: what happens to a run that is stuck, beside the report: "report" (nothing), "restart" or "leave".
        assignment, reach: what other hosts run and how they are reached, where this one starts it there.
        cluster: the launcher's own settings, an object of its class in `config/clusters`; None where it has none.
        store: URL of a store off the nodes (`store.py`); "" for none.
        tls: whether launchers encrypt what they say to each other: "no", "yes", or files joined by commas (`tls.py`).
        secret: by which the launchers of several nodes know each other; "" for the user's own (`secret.py`).
        watch: folder of the journal of a watched run; `recording.NEW_FOLDER` for one that is made, "" where none is kept.
        metrics_port: at which the first host serves the numbers of the run to Prometheus; None for nowhere.
        allocation: the nodes that SLURM has given to the job that this process is in; None where it is in none.
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
    assignment: Assignment | None = None
    reach: Reach = Reach()
    cluster: Any = None
    store: str = field(default="", repr=False)  # it may hold a password
    tls: str = "no"
    secret: str = field(default="", repr=False)
    watch: str = ""
    metrics_port: int | None = None
    allocation: Allocation | None = None

    @property
    def assigned(self) -> Assignment:
        """What other hosts run, of a job that they do."""
        assert self.assignment is not None, "a job of other hosts has an assignment"
        return self.assignment


@dataclass(frozen=True)
class Process:
    """One process of a job: its row in the world table, its own variables and, where it has such, its own cores."""

    rank: int
    local_rank: int
    env: Mapping[str, str]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rendered:
    """A job made exact; nothing has been started.

    Attributes:
        job: where it comes from.
        command: what each process runs, as one would type it.
        processes: those of this node.
        steps: where other hosts run the job: what this one runs to reach each, or all of them in turn.
        document: what a cluster is given, such as a batch script or a manifest; "" for none. `--dry-run` prints it.
    """

    job: Job
    command: tuple[str, ...]
    processes: tuple[Process, ...] = ()
    steps: tuple[tuple[str, ...], ...] = ()
    document: str = ""

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

    def _text_on(self, assignment: Assignment) -> str:
        """Of a job that other hosts run; no value of a variable is shown, as it may be a secret."""
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
        rank, local_rank, node, pid: which one.
        code: its exit code; the negative signal number where a signal ended it.
        at: when (seconds since the epoch).
        report: its traceback, or "" where it left none.
        later: what to say of the processes that failed by themselves afterwards, a line each.
        waiting: the ranks that failed because this one left, without an error of its own, while they waited for it.
        stuck: where all ranks were, of a run that was ended as none made progress; "" of any other.
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
        """As a shell counts: 128 + the signal's number, where one ended the process."""
        if self.stuck:
            return STUCK
        if self.waiting:
            return 1  # its own says that nothing went wrong
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True)
class Outcome:
    """What came of a job on this node.

    Attributes:
        exit_code: 0 where all processes ended well; `PREEMPTED` where they were asked to end, have saved and ended.
        failure: the first failure of the last attempt on this node; None for none.
        elsewhere: what failed first, where that was on another node.
        restarts: how often the processes were started again.
        value: what a function returned on rank 0.
        in_worker: this is one of the processes themselves, at the end of its script: say nothing and leave.
    """

    exit_code: int
    failure: Failure | None = None
    elsewhere: str = ""
    restarts: int = 0
    value: Any = None
    in_worker: bool = False

    @property
    def reason(self) -> str:
        """What failed first, in a sentence; "" where nothing has failed."""
        if self.elsewhere:
            return self.elsewhere
        return self.failure.what if self.failure is not None else ""


class Handle(Protocol):
    """A job that was handed over."""

    def wait(self) -> Outcome:
        """Waits until all its processes have ended."""
        ...


# Whose processes a launcher starts: this host's, those of the hosts that a hostfile names, or those of hosts that it
# chooses itself, as a cluster's scheduler does. With "either" it starts those of a hostfile where there is one.
Hosts = Literal["this", "named", "chosen", "either"]


class Launcher(Protocol):
    """A way to start processes.

    One whose hosts a scheduler has given to this process may also have `placed(job, env) -> Job`: the job on these hosts.

    Attributes:
        name: what `--on` calls it.
        hosts: on which hosts it starts them.
    """

    name: str
    hosts: Hosts

    def available(self) -> str:
        """ "" where it can be used here, else the reason why not."""
        ...

    def render(self, job: Job) -> Rendered:
        """Makes a job exact; pure: starts nothing, looks at nothing but the job."""
        ...

    def submit(self, rendered: Rendered) -> Handle:
        """Checks what can be checked, and hands the job over."""
        ...
