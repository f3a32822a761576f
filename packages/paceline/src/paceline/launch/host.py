"""Reads what a launch must know of this host (cores, accelerators, free ports), and checks a job before it starts."""

from __future__ import annotations

import errno
import importlib.machinery
import os
import pkgutil
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.errors import LaunchError, Problem
from paceline.base.lazy import fast_imports
from paceline.config.given import nearest
from paceline.launch.job import Job, Target
from paceline.world import torch_version


@dataclass(frozen=True)
class Accelerators:
    """Holds the kind of the accelerators, such as "cuda", and their number; "" and 0 for none."""

    kind: str = ""
    count: int = 0


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(core_numbers()) or os.cpu_count() or 1


def core_numbers() -> tuple[int, ...]:
    """Returns the numbers of these cores; () if the system cannot bind processes to cores."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0)))


def name() -> str:
    """Returns the name of this host."""
    return socket.gethostname()


def accelerators() -> Accelerators:
    """Returns the accelerators of this host. It imports torch; with a CPU build the process can still be forked afterwards."""
    with fast_imports():
        import torch

    torch_version.check(torch.__version__, warn=False)  # an older torch may not have `torch.accelerator`
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return Accelerators()
    return Accelerators(accelerator.type, torch.accelerator.device_count())


def hold_port(port: int) -> socket.socket:
    """Returns a socket that reserves a port (0: a free one), while rank 0 can still listen there.

    The socket is bound and does not listen. With SO_REUSEADDR, which the store of rank 0 sets too, both can use the port.

    Raises:
        OSError: the port cannot be used.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The socket then also covers IPv4, so that a port which an IPv4 program uses does not count as free.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("", port))
    except OSError as error:
        sock.close()
        # Where IPv6 is turned off in the settings of the kernel, a socket can still be created, but not bound.
        ipv6_is_off = family == socket.AF_INET6 and error.errno == errno.EADDRNOTAVAIL
        if ipv6_is_off:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
            return sock
        raise
    return sock


def free_port() -> int:
    """Returns a port of this host at which nothing listens now."""
    with hold_port(0) as held:
        return int(held.getsockname()[1])


def check(job: Job) -> None:
    """Checks a job before anything is started.

    Raises:
        LaunchError: `launch-script`, `launch-port`, `launch-node`, `launch-log-dir`; all problems in one error.
    """
    results = (_node(job), unusable(job.target), _port(job), _log_dir(job))
    problems = [problem for problem in results if problem is not None]
    if problems:
        raise LaunchError.of(problems)


def _node(job: Job) -> Problem | None:
    if job.node_rank < job.nodes or not job.numbered:
        return None
    fix = "set --nodes too"
    if job.nodes > 1:
        fix = f"give each node another --node-rank, 0 to {job.nodes - 1}"
    return Problem(
        "launch-node",
        f"node {job.node_rank} does not exist: there are {job.nodes}, numbered from 0.",
        f"--node-rank {job.node_rank}, --nodes {job.nodes}",
        fix,
    )


def try_to_write(folder: Path) -> None:
    """Makes a folder, and a file in it for a moment.

    Raises:
        OSError: this user cannot do so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".{os.getpid()}"
    probe.touch()
    probe.unlink()


# What was typed before the script until then: `python train.py`.
_PYTHON = re.compile(r"(.*/)?python[\d.]*")


def check_target(target: Target) -> None:
    """Checks that a target exists, before torch is imported, which takes seconds.

    Raises:
        LaunchError: `launch-script`.
    """
    problem = unusable(target)
    if problem is not None:
        raise LaunchError.of([problem])


def unusable(target: Target) -> Problem | None:
    """Returns the problem with a target that cannot be run here; None if it can."""
    fix = "give the path of a Python file; `-m` for a module's name, `--no-python` for a program"
    if target.kind == "script":
        script = next(iter(target.args), "")
        if _PYTHON.fullmatch(target.name):
            fix = f"leave {target.name!r} out: Paceline starts Python itself"
        elif script.endswith(".py") and Path(script).is_file():
            fix = f"leave {target.name!r} out, as the option before it takes no value; the script is then {script}"
        return _unusable_script(Path(target.name), target.name, fix)
    if target.kind == "module":
        return _unusable_module(target.name, fix)
    if target.kind == "program" and shutil.which(target.name) is None:
        return Problem("launch-script", f"there is no program {target.name!r}.", "it is not on PATH", fix)
    return None


def _unusable_script(path: Path, written: str, fix: str) -> Problem | None:
    """Returns the problem with a script; None if it can be run.

    Args:
        path: the script.
        written: its name as the user wrote it.
        fix: the fix if no file is found that the user probably meant.
    """
    if path.is_file() and os.access(path, os.R_OK):
        return None
    if not written:
        why = "its name is empty, as the value of a shell variable that is not set"
    elif path.is_dir():
        why = "it is a directory"
        for name in ("__main__.py", "main.py", "train.py"):
            if (path / name).exists():
                fix = f"write {Path(written) / name}"
                break
    elif path.exists():
        why = "it cannot be read"
    else:
        why = "there is no such file"
        folder = path.parent if path.parent.is_dir() else Path()
        files = [file.name for file in folder.iterdir() if file.is_file()]
        similar_name = nearest(path.name, files)
        if similar_name:
            fix = f"write {folder / similar_name}"
    return Problem("launch-script", f"the script {written!r} cannot be run.", f"{why} ({path.absolute()})", fix)


def _unusable_module(name: str, fix: str) -> Problem | None:
    """Returns the problem with a module. Nothing is imported, because an import runs the code of a package."""
    search: Sequence[str] | None = [os.getcwd(), *sys.path]  # as `python -m` does
    parts = name.split(".")
    for depth, part in enumerate(parts, 1):
        full = ".".join(parts[:depth])
        if full in sys.modules or full in sys.builtin_module_names:
            return None
        # By its last part, because the path of a folder without `__init__.py` is otherwise computed from its package, which
        # must have been imported for that.
        spec = importlib.machinery.PathFinder.find_spec(part, search)
        if spec is None:
            # The first part is searched for on the whole path, and every other one only in its package.
            where = f"{os.getcwd()} and on the path of Python" if depth == 1 else "its package"
            why = f"looked for {full} in {where}"
            if depth == len(parts):
                folders = ["."] if depth == 1 else search
                modules = [module.name for module in pkgutil.iter_modules(folders)]
                similar_name = nearest(part, modules)
                if similar_name:
                    fix = f"write {'.'.join([*parts[:-1], similar_name])}"
            return Problem("launch-script", f"there is no module {name!r}.", why, fix)
        if spec.origin is not None and "__path__" in Path(spec.origin).read_text(encoding="utf-8", errors="replace"):
            return None  # such a package sets the path of its modules itself
        search = list(spec.submodule_search_locations or [])
    return None


def _port(job: Job) -> Problem | None:
    if job.node_rank != 0 or job.main_port == 0 or not job.numbered:
        return None
    try:
        hold_port(job.main_port).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        # A notebook passes the port as an argument, and the command as a flag.
        name, separator = ("use_port", "=") if job.target.kind == "function" else ("--main-port", " ")
        fix = f"give another {name} on all nodes"
        if job.nodes == 1:
            fix = f"remove {name} (then a free port is found)"
        return Problem(
            "launch-port",
            f"port {job.main_port} cannot be used on this host: {reason}.",
            f"{name}{separator}{job.main_port}; another program, perhaps an earlier run, may be listening there",
            fix,
        )
    return None


def _log_dir(job: Job) -> Problem | None:
    if job.log_dir is None:
        return None
    try:
        try_to_write(Path(job.log_dir))
    except OSError as error:
        why = f"--log-dir {job.log_dir}: {error.strerror}"
        return Problem(
            "launch-log-dir", "the output of the processes cannot be written.", why, "give a directory of yours"
        )
    return None
