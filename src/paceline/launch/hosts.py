"""Turns settings that name other hosts into a job that one of the launchers starts there."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError, LaunchError, Problem
from paceline.config.sources import Launch
from paceline.launch import hostfile
from paceline.launch.forward import forwarded
from paceline.launch.hostfile import Slots
from paceline.launch.launcher import LAUNCHERS, Job, Reach, Target
from paceline.launch.orders import Orders

_NEEDS_HOSTS = ("include", "exclude", "ssh_port", "launcher", "launcher_args")
_OF_ONE_NODE = ("node_rank", "gpu_ids")


def job_on_hosts(
    told: Launch,
    script: str,
    args: Sequence[str],
    env: Mapping[str, str],
    *,
    local_rank: bool = False,
    activate: str = "",
) -> Job:
    """The job, for the launcher that the settings name.

    Args:
        told: the merged settings; they name a hostfile.
        script: path of a file, name of a module, or a program.
        args: the script's own arguments.
        env: the environment of this process.
        local_rank: whether `--local_rank=N` goes before them.
        activate: a shell script to be sourced on each host first; "" for none.

    Raises:
        ConfigError: `hostfile`, `host-filter`, `host-flags`, `unknown-name`.
        LaunchError: `launch-launcher`, where the launcher cannot be used here; `launch-env-file`.
    """
    launch, cwd = told.launch, os.getcwd()
    missing = LAUNCHERS.get(launch.launcher).available()
    if missing:
        others = ", ".join(each.name for each in LAUNCHERS if each.name != "local" and not each.available())
        raise LaunchError(
            "launch-launcher",
            f"the launcher {launch.launcher} cannot be used: {missing}.",
            f"--launcher {launch.launcher}",
            f"install it, or choose another: {others}" if others else "install it",
        )
    orders = Orders(told, script, tuple(args), cwd, forwarded(env, cwd), chosen(told), local_rank)
    kind = "program" if launch.no_python else "module" if launch.module else "script"
    return Job(
        Target(kind, script, tuple(args), local_rank=local_rank), max(len(at.ids) for at in orders.hosts),
        len(orders.hosts), main_address=launch.main_address or "", main_port=launch.main_port, grace_s=launch.grace_s,
        orders=orders, reach=Reach(launch.ssh_port, tuple(shlex.split(launch.launcher_args)), activate),
    )  # fmt: skip


def chosen(told: Launch) -> tuple[Slots, ...]:
    """The hosts and slots that the settings name.

    Raises:
        ConfigError: `hostfile`, `host-filter`, `host-flags`.
    """
    launch, said = told.launch, _said(told)
    problems = []
    for name in _OF_ONE_NODE:
        if name in said:
            why = f"{said[name]}; --hostfile {launch.hostfile}"
            fix = "leave it out: the order of the hostfile numbers the nodes, --include chooses their slots"
            problems.append(Problem("host-flags", f"{name} is of one node, and a hostfile names all.", why, fix))
    if isinstance(launch.nodes, str):
        fix = "give one number, or start the command on each host without --hostfile"
        what = "a range of nodes cannot be started from one host."
        problems.append(Problem("host-flags", what, f"nodes={launch.nodes} ({said['nodes']})", fix))
    if problems:
        raise ConfigError.of(problems)
    assert launch.hostfile is not None, "asked for where there is one"
    counts: dict[str, Any] = {
        name: value
        for name, value in (("nodes", launch.nodes), ("procs", launch.procs))
        if name in said and value != "auto"
    }
    hosts = hostfile.read(text_of(launch.hostfile), launch.hostfile)
    return hostfile.choose(hosts, include=launch.include, exclude=launch.exclude, **counts)


def without_hostfile(told: Launch) -> None:
    """Sees to it that nothing was said that only a hostfile gives a meaning to.

    Raises:
        ConfigError: `host-flags`, naming all of it.
    """
    said = _said(told)
    idle = [f"{name}={getattr(told.launch, name)} ({said[name]})" for name in _NEEDS_HOSTS if name in said]
    if idle:
        raise ConfigError(
            "host-flags", "there are no hosts to choose from or to reach.", idle, "name them: --hostfile FILE"
        )


def text_of(path: str) -> str:
    """What a hostfile holds.

    Raises:
        ConfigError: `hostfile`, where it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or "").lower() if isinstance(error, OSError) else "it is no text"
        fix = "write one: a line `HOST slots=N` for each host"
        raise ConfigError("hostfile", f"the hostfile {path} cannot be read.", why, fix) from None


def _said(told: Launch) -> dict[str, str]:
    """Where each setting comes from that somebody has set."""
    return {row.field: row.where or row.source for row in told.decisions if row.source != "default"}
