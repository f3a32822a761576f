"""`Job`: what is to run, where, and how it is watched. `make_job` makes it from settings, and a `Launcher` renders it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paceline.config.settings import OnHang


NEW_FOLDER = "new"  # the value of `Job.watch` for a run that gets a new folder in `runs/`


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
        watch: the folder for the journal of a watched run; `NEW_FOLDER` for a new one, "" for no journal.
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
    on_hang: OnHang = "report"
    assignment: OnHosts | None = None
    reach: Reach = Reach()
    cluster: Any = None
    store: str = field(default="", repr=False)  # it may hold a password
    tls: str = "no"
    secret: str = field(default="", repr=False)
    watch: str = ""
    metrics_port: int | None = None
    allocation: Any = None
