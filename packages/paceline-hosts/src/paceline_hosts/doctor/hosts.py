"""Finds the hosts to examine, and how each one is reached: by ssh, by srun, or as a process of this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.sources import Launch
from paceline.launch import host
from paceline.launch.make_job import without_hostfile
from paceline.world.detect import slurm
from paceline_hosts.assignment import assignment_of
from paceline_hosts.hosts import forwarded, job_on_hosts
from paceline_hosts.launchers import ssh

AGENT = "paceline_hosts.doctor.host.agent"


@dataclass(frozen=True)
class Reached:
    """Describes the hosts of an examination, and how they are reached.

    Attributes:
        names: names of the hosts, in their order.
        commands: for each host the command that starts the agent; its input and output are the connection.
        env: environment variables that the hosts get, the same as in a run.
        port: port of the ssh servers; None for that of ssh's configuration.
        by: program that reaches the hosts: "ssh", "srun", or "" if there is only this host.
    """

    names: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    env: Mapping[str, str]
    port: int | None = None
    by: str = ""


def reach(settings: Launch, env: Mapping[str, str]) -> Reached:
    """Returns the hosts that the settings name; without any, those of the SLURM allocation of this command, or this host.

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
        names = tuple(slots.host for slots in assignment_of(job).hosts)
        return Reached(names, tuple(ssh.connections(job, AGENT)), carried, job.reach.port, "ssh")
    without_hostfile(settings)
    here = (sys.executable, "-m", AGENT)
    nodes = env.get("SLURM_JOB_NODELIST", "")
    if nodes and env.get("SLURM_JOB_NUM_NODES", "1") != "1":
        names = tuple(slurm.expand(nodes))
        return Reached(names, tuple(_srun(name) + here for name in names), carried, None, "srun")
    return Reached((host.name(),), (here,), carried)


def _srun(name: str) -> tuple[str, ...]:
    """Returns the beginning of a command that starts one task on one host of this allocation.

    The task may share the host with other steps of the allocation (`--overlap`), and it reads its input from this process
    (`--input=0`).
    """
    place = ("--nodes=1", "--ntasks=1", "-w", name, "--overlap", "--cpu-bind=none")
    return ("srun", *place, "--export=ALL", "--input=0", "--unbuffered", "--quiet")
