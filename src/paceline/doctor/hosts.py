"""Which hosts are examined, and what carries the connection to each: ssh, srun, or a process of this host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.base.errors import LaunchError
from paceline.config.sources import Launch
from paceline.launch import host, ssh
from paceline.launch.hosts import forwarded, job_on_hosts, without_hostfile

AGENT = "paceline.doctor.host.agent"
_SCONTROL_S = 20.0


@dataclass(frozen=True)
class Reached:
    """The hosts of an examination.

    Attributes:
        names: what they are called, in their order.
        commands: what carries the connection to each.
        env: variables that go along, as those of a run do.
        port: of their sshds; None where ssh knows it.
        by: what reaches them: "ssh", "srun", or "" for this host alone.
    """

    names: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    env: Mapping[str, str]
    port: int | None = None
    by: str = ""


def reach(settings: Launch, env: Mapping[str, str]) -> Reached:
    """The hosts that the settings name; else those of the SLURM allocation around this command; else this host.

    Args:
        settings: the merged settings.
        env: the environment of this process.

    Raises:
        ConfigError: `hostfile`, `host-filter`, `host-flags`.
        LaunchError: `launch-launcher`, `launch-env-file`, `doctor-allocation`.
    """
    carried = forwarded(env, os.getcwd())
    if settings.launch.hostfile is not None:
        job = job_on_hosts(settings, AGENT, (), env)
        names = tuple(slots.host for slots in job.assigned.hosts)
        return Reached(names, tuple(ssh.connections(job, AGENT)), carried, job.reach.port, "ssh")
    without_hostfile(settings)
    here = (sys.executable, "-m", AGENT)
    nodes = env.get("SLURM_JOB_NODELIST", "")
    if nodes and env.get("SLURM_JOB_NUM_NODES", "1") != "1":
        names = _hostnames(nodes)
        return Reached(names, tuple(_srun(name) + here for name in names), carried, None, "srun")
    return Reached((host.name(),), (here,), carried)


def _hostnames(nodes: str) -> tuple[str, ...]:
    """The names of an allocation's hosts, which SLURM writes in a short form such as "node[01-03]"."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCONTROL_S,
        )
        reason = " ".join(done.stderr.split())
        names = tuple(done.stdout.split()) if done.returncode == 0 else ()
    except (OSError, subprocess.TimeoutExpired) as error:
        names, reason = (), str(error)
    if not names:
        raise LaunchError(
            "doctor-allocation",
            "the hosts of this SLURM allocation cannot be listed.",
            [f"SLURM_JOB_NODELIST is {nodes!r}", f"scontrol show hostnames: {reason or 'said nothing'}"],
            "name the hosts in a file, a line `HOST slots=N` each: `paceline doctor --hostfile FILE`",
        )
    return names


def _srun(name: str) -> tuple[str, ...]:
    """Starts one task on one host of this allocation, beside whatever the allocation runs; it reads what we write."""
    place = ("--nodes=1", "--ntasks=1", "-w", name, "--overlap", "--cpu-bind=none")
    return ("srun", *place, "--export=ALL", "--input=0", "--unbuffered", "--quiet")
