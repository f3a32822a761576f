"""Which hosts are examined, and what carries the connection to each: ssh, srun, or a process of this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.sources import Launch
from paceline.launch import host
from paceline.launch.launchers import ssh
from paceline.launch.remote.hosts import forwarded, job_on_hosts, without_hostfile
from paceline.world.detect import slurm

AGENT = "paceline.doctor.host.agent"


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
        LaunchError: `launch-launcher`, `launch-env-file`.
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
        names = tuple(slurm.expand(nodes))
        return Reached(names, tuple(_srun(name) + here for name in names), carried, None, "srun")
    return Reached((host.name(),), (here,), carried)


def _srun(name: str) -> tuple[str, ...]:
    """Starts one task on one host of this allocation, beside whatever the allocation runs; it reads what we write."""
    place = ("--nodes=1", "--ntasks=1", "-w", name, "--overlap", "--cpu-bind=none")
    return ("srun", *place, "--export=ALL", "--input=0", "--unbuffered", "--quiet")
