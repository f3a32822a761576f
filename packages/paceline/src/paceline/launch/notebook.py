"""`notebook_launcher` and `debug_launcher` start several processes from a notebook, or from any Python session.

    one process        the function is called in this process
    several processes  the function is packed by cloudpickle, with the variables that it uses, and unpacked in fresh processes

The processes are fresh ones because a notebook cannot be forked safely. A copy of a process that has used an accelerator
cannot use it, and a copy of a process whose OpenMP threads have run waits for ever for threads that it does not have.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from paceline.base import env as environment
from paceline.base.devices import device_type
from paceline.base.errors import ConfigError, LaunchError
from paceline.base.exits import PREEMPTED
from paceline.base.host_port import host_and_port
from paceline.base.terminal import say
from paceline.config.given import Choice
from paceline.config.keywords import checked_keywords
from paceline.config.libraries import LIBRARIES
from paceline.config.settings import settings_of
from paceline.config.sources import hand_over
from paceline.launch import host
from paceline.launch.failure_report import problem_of
from paceline.launch.job import Job, Target
from paceline.launch.launcher import LAUNCHERS, Outcome
from paceline.launch.notebook_cells import who_touched

_USUAL_PORT = "29500"


@checked_keywords
def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: Literal["no", "fp16", "bf16", "fp8"] = "no",
    use_port: str | int = _USUAL_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Calls a function in several processes, and returns what it returned on rank 0.

    Whatever the processes print appears in the cell. The function makes its own `Accelerator`.

    Args:
        function: what to run; it may be defined in a cell.
        args: its arguments, a tuple or a list.
        num_processes: processes on this node; None for one for each accelerator, or 1 where there is none.
        mixed_precision: "no", "fp16", "bf16" or "fp8", unless the function's `Accelerator` says otherwise.
        use_port: port of node 0; on one node the usual one stands for any free one.
        master_addr: address of node 0.
        node_rank, num_nodes: number of this node, and how many there are; call it on each of them.
        rdzv_backend, rdzv_conf: how several nodes find each other, and options such as {"timeout": 600}.
        rdzv_endpoint: "host:port" of node 0, instead of `master_addr` and `use_port`.
        rdzv_id: accepted for the sake of existing notebooks; the port tells runs apart.
        max_restarts: how often all processes are started again after one has failed.
        monitor_interval: seconds between two looks at the processes.
        log_line_prefix_template: what stands before each printed line, such as "[${rank}] "; None for nothing.

    Returns:
        What the function returned on rank 0; None on the other nodes.

    Raises:
        LaunchError: `rank-failed` or `node-failed` after the report, `launch-inside`, `launch-pickle`,
            `launch-accelerator`, those of `host.check` and, on several nodes, those of `nodes_of`.
        ConfigError: `config-value`, `launch-arguments`.
    """
    # Not deleted: IPython shows the arguments of each call in a traceback, and could not show those of this one then.
    _ = rdzv_id
    _check_not_launched()
    _check_arguments(function, args)
    settings_env = _settings_env(mixed_precision=mixed_precision) if mixed_precision != "no" else {}
    _check_node_rank(node_rank, num_nodes)
    accelerators = host.accelerators()
    procs = _count(num_processes, accelerators)
    world_size = procs * num_nodes
    print(_announce(world_size, accelerators), flush=True)
    if world_size == 1:
        with environment.patched(settings_env):
            return function(*args)

    main_address, main_port = _place_of_node_0(master_addr, use_port, rdzv_endpoint, num_nodes)
    job = replace(
        _job(function, args, procs, accelerators, settings_env),
        nodes=num_nodes,
        node_rank=node_rank,
        main_address=main_address,
        main_port=main_port,
        max_restarts=max_restarts,
        monitor_interval_s=monitor_interval,
        mark=log_line_prefix_template or "",
        numbered=rdzv_backend == "static",
        backend=rdzv_backend,
        options={name: str(value) for name, value in (rdzv_conf or {}).items()},
    )
    return _carry_out(job)


@checked_keywords
def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Any:
    """Calls a function in several processes on the CPU, to try out whether it works on several at all.

    Args:
        function: what to run.
        args: its arguments.
        num_processes: how many.

    Returns:
        What it returned on rank 0.

    Raises:
        LaunchError: as `notebook_launcher`.
    """
    _check_not_launched()
    _check_arguments(function, args)
    accelerators = host.Accelerators()  # none, whatever this host has
    procs = _count(num_processes, accelerators)
    job = _job(function, args, procs, accelerators, _settings_env(cpu=True))
    return _carry_out(job)


def _job(
    function: Callable[..., Any],
    args: Sequence[Any],
    procs: int,
    accelerators: host.Accelerators,
    settings_env: Mapping[str, str],
) -> Job:
    given_threads = environment.get("OMP_NUM_THREADS")
    # By default the processes share the cores: each would otherwise start a thread for every core of the host.
    threads = given_threads or max(host.cores() // procs, 1)
    place = who_touched(accelerators.kind) if accelerators.count else None
    if place:
        say(
            f"{accelerators.kind} is in use in this session already ({place}). The processes start afresh, so they "
            "work; but this session keeps memory of the device. Move that code into the function to free it."
        )
    name = getattr(function, "__qualname__", type(function).__name__)
    target = Target("function", name, function=partial(function, *args))
    # The processes are served the same libraries as this session, whose import hooks name them.
    finders = [getattr(finder, "library", "") for finder in sys.meta_path]
    served = [library for library in LIBRARIES.names() if library in finders]
    return Job(
        target,
        procs,
        start="exec",  # a fork would share threads and devices that the session has used
        env={**settings_env, "OMP_NUM_THREADS": str(threads)},
        tee=dict.fromkeys(range(procs), 3),
        mark="",
        compat=",".join(served),
    )


def _carry_out(job: Job) -> Any:
    launcher = LAUNCHERS.get("local")
    handle = launcher.submit(launcher.render(job))
    outcome: Outcome = handle.wait()
    if outcome.reason:
        if outcome.failure is not None and not outcome.elsewhere:
            print(outcome.failure.report, file=sys.stderr, flush=True)
        raise LaunchError.of([problem_of(outcome, job)])
    if outcome.exit_code == PREEMPTED:
        # The processes have saved. This exit code tells a scheduler that it may start this process again.
        raise SystemExit(PREEMPTED)
    if outcome.exit_code:
        # A signal asked the processes to end, and was meant for this one too. The launcher took it while it waited, so it
        # is raised again here. An exit code above 128 is that of a signal, as a shell counts.
        signum = outcome.exit_code - 128
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        os.kill(os.getpid(), signum)
    return outcome.value


def _check_not_launched() -> None:
    """Raises if this process is one of several that a launcher started: each of them would start more.

    Raises:
        LaunchError: `launch-inside`.
    """
    rank = environment.get("RANK")
    size = environment.get("WORLD_SIZE")
    if rank is not None and (size or 1) > 1:
        raise LaunchError(
            "launch-inside",
            "this process is one of several already, and would start more.",
            why=f"RANK={rank}, WORLD_SIZE={size} in the environment",
            fix="call the function itself, or start the script with plain `python`",
        )


def _check_arguments(function: Any, args: Any) -> None:
    """Checks that `function` can be called, and that `args` is a tuple or a list.

    Raises:
        ConfigError: `launch-arguments`.
    """
    if not callable(function):
        raise ConfigError(
            "launch-arguments",
            f"what is to run cannot be {function!r}, which is of type {type(function).__name__}.",
            why="the first argument is a function; `train()` calls it here and now, and passes what it returns",
            fix="write the function without parentheses, and its arguments apart: notebook_launcher(train, args=())",
        )
    if isinstance(args, (tuple, list)):
        return
    raise ConfigError(
        "launch-arguments",
        f"the function's arguments cannot be {args!r}, which is of type {type(args).__name__}.",
        why="args is a tuple or a list with one entry for each argument; (x) is x, and (x,) is a tuple with one entry",
        fix=f"write args=({args!r},)",
    )


def _check_node_rank(node_rank: int, num_nodes: int) -> None:
    """Checks that there is a node of this number.

    Raises:
        ConfigError: `config-value`.
    """
    if node_rank >= num_nodes:
        raise ConfigError(
            "config-value",
            f"node_rank must be less than the number of nodes: it is {node_rank}, and there are {num_nodes}.",
            why=f"it comes from notebook_launcher(node_rank={node_rank}, num_nodes={num_nodes})",
            fix=f"give each node its own node_rank, 0 to {num_nodes - 1}",
        )


def _place_of_node_0(master_addr: str, use_port: str | int, rdzv_endpoint: str, num_nodes: int) -> tuple[str, int]:
    """Returns the address and the port of node 0; the port 0 stands for any free one.

    Raises:
        ConfigError: `config-value`.
    """
    argument = "use_port"
    if rdzv_endpoint:
        master_addr, port_text = host_and_port(rdzv_endpoint)
        if port_text:
            argument = "rdzv_endpoint"
            use_port = port_text
    # On one node nobody has to know the port beforehand, and the usual one may belong to another notebook's run.
    if num_nodes == 1 and str(use_port) == _USUAL_PORT:
        return master_addr, 0
    return master_addr, _read_setting("main_port", argument, use_port)


def _count(num_processes: int | None, accelerators: host.Accelerators) -> int:
    procs = num_processes
    if procs is None:
        procs = max(accelerators.count, 1)
    if isinstance(procs, int) and procs >= 1:
        return procs
    raise ConfigError(
        "config-value",
        f"num_processes cannot be {procs!r}.",
        why="it comes from notebook_launcher(num_processes=...); expected: a whole number of at least 1",
        fix="leave it out, or say how many",
    )


def _settings_env(**values: Any) -> dict[str, str]:
    """Returns the variable with settings for the processes, in the form in which `paceline launch` hands them on."""
    rows = []
    for name, value in values.items():
        setting_value = _read_setting(name, name, value)
        rows.append(Choice(name, setting_value, "command line", f"notebook_launcher({name}=...)"))
    return {"PACELINE_SETTINGS": hand_over(rows)}


def _read_setting(name: str, argument: str, value: Any) -> Any:
    """Returns the value of an argument as the setting `name` takes it.

    Raises:
        ConfigError: `config-value`.
    """
    try:
        return settings_of()[name].kind.read(value)
    except ValueError as error:
        why = f"it comes from notebook_launcher({argument}=...); expected: {error}"
        raise ConfigError("config-value", f"{argument} cannot be {value!r}.", why, "use one of those") from None


def _announce(size: int, accelerators: host.Accelerators) -> str:
    if size == 1 and not accelerators.count:
        return "Launching training on CPU."
    title = device_type(accelerators.kind or "cpu").title
    if size == 1:
        return f"Launching training on one {title}."
    return f"Launching training on {size} {title}{'es' if title.endswith('s') else 's'}."
