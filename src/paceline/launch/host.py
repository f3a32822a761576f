"""Facts about this host that a launch rests on: cores, accelerators, ports, files."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import LaunchError, Problem
from paceline.base.lazy import uncollected
from paceline.launch.launcher import Job, Target
from paceline.world import torch_version


@dataclass(frozen=True)
class Accelerators:
    """What `torch.accelerator` finds here: "cuda", "xpu", ... and how many; "" and 0 for none."""

    kind: str = ""
    count: int = 0


def cores() -> int:
    """Cores that this process may use."""
    return len(core_numbers()) or os.cpu_count() or 1


def core_numbers() -> tuple[int, ...]:
    """Which ones; none where the system does not bind processes to cores."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def name() -> str:
    """This host's name."""
    return socket.gethostname()


def accelerators() -> Accelerators:
    """Looks for accelerators; imports torch, and leaves a CPU build's process fit for forking."""
    with uncollected():
        import torch

    torch_version.check(torch.__version__, warn=False)  # an older one may lack what comes next
    found = torch.accelerator.current_accelerator(check_available=True)
    return Accelerators(found.type, torch.accelerator.device_count()) if found else Accelerators()


def hold_port(port: int) -> socket.socket:
    """A socket that keeps a port (0: a free one) from being given to anybody else, while rank 0 may listen there.

    It is bound and never listens: with SO_REUSEADDR, which rank 0's store sets too, both can have the port.

    Raises:
        OSError: the port cannot be had.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", port))
    except OSError as error:
        held.close()
        if family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL:  # IPv6 is there, but switched off
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", port))
            return held
        raise
    return held


def listen_at(address: str, port: int) -> socket.socket:
    """A socket that listens at one address of this host alone, at a port (0: a free one).

    Raises:
        OSError: the address is none of this host's, or the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def check(job: Job) -> None:
    """Finds everything that would fail at once, before anything is started.

    Raises:
        LaunchError: `launch-script`, `launch-port`, `launch-node`, `launch-log-dir`; all that is wrong at once.
    """
    problems = [problem for problem in (_node(job), unusable(job.target), _port(job), _log_dir(job)) if problem]
    if problems:
        raise LaunchError.of(problems)


def _node(job: Job) -> Problem | None:
    if job.node_rank < job.nodes or not job.numbered:
        return None
    return Problem(
        "launch-node",
        f"node {job.node_rank} does not exist: there are {job.nodes}, numbered from 0.",
        f"--node-rank {job.node_rank}, --nodes {job.nodes}",
        f"give each node another --node-rank, 0 to {job.nodes - 1}" if job.nodes > 1 else "say --nodes too",
    )


def unusable(target: Target) -> Problem | None:
    """Why a target cannot be run here; None where it can."""
    fix = "give the path of a Python file; `-m` for a module's name, `--no-python` for a program"
    if target.kind == "script":
        path = Path(target.name)
        if path.is_file() and os.access(path, os.R_OK):
            return None
        why = (
            "it is a directory" if path.is_dir() else "it cannot be read" if path.exists() else "there is no such file"
        )
        return Problem("launch-script", f"the script {target.name!r} cannot be run.", f"{why} ({path.absolute()})", fix)
    if target.kind == "module":
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            known = importlib.util.find_spec(target.name.split(".")[0]) is not None
        except ValueError:
            known = True  # it is loaded already
        finally:
            sys.path.pop(0)
        why = f"looked for {target.name.split('.')[0]} in {os.getcwd()} and Python's path"
        return None if known else Problem("launch-script", f"there is no module {target.name!r}.", why, fix)
    if target.kind == "program" and shutil.which(target.name) is None:
        return Problem("launch-script", f"there is no program {target.name!r}.", "looked for it on PATH", fix)
    return None


def _port(job: Job) -> Problem | None:
    if job.node_rank != 0 or job.main_port == 0 or not job.numbered:
        return None
    try:
        hold_port(job.main_port).close()
    except OSError as error:
        return Problem(
            "launch-port",
            f"port {job.main_port} cannot be used on this host: {os.strerror(error.errno or 0).lower()}.",
            f"--main-port {job.main_port}; another program, perhaps an earlier run, may be listening there",
            "leave --main-port out (a free one is found)"
            if job.nodes == 1
            else "give another --main-port on all nodes",
        )
    return None


def _log_dir(job: Job) -> Problem | None:
    if job.log_dir is None:
        return None
    try:
        Path(job.log_dir).mkdir(parents=True, exist_ok=True)
        (Path(job.log_dir) / f".{os.getpid()}").touch()
        (Path(job.log_dir) / f".{os.getpid()}").unlink()
    except OSError as error:
        why = f"--log-dir {job.log_dir}: {error.strerror}"
        return Problem(
            "launch-log-dir", "the output of the processes cannot be written.", why, "give a directory of yours"
        )
    return None
