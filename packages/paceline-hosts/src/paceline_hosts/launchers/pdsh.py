"""Starts hosts with pdsh, which uses ssh.

pdsh does not pass its input on to the hosts. So the assignment is sent before, over the ssh connections that check each host,
and stored there in a file that only this user may read, until pdsh starts the hosts. When pdsh ends, its connections end,
and with them everything that they have started.
"""

from __future__ import annotations

import os
import secrets
import shutil

from paceline.base import env as environment
from paceline.launch.job import Job
from paceline.launch.launcher import Hosts, Rendered
from paceline_hosts.assignment import assignment_of
from paceline_hosts.launchers.batch import BatchHandle
from paceline_hosts.launchers.ssh import OPTIONS, connect, shell_line
from paceline_hosts.remote.channels import HostChannels

_FAN_OUT = 1024  # how many hosts pdsh starts at the same time. It must be all: the launchers wait for each other.


class PdshLauncher:
    """Starts a job on other hosts with pdsh."""

    name = "pdsh"
    hosts: Hosts = "named"

    def available(self) -> str:
        """Returns what is missing on this host; "" if nothing is."""
        missing = [name for name in ("pdsh", "ssh") if shutil.which(name) is None]
        return f"there is no {' and no '.join(missing)} on this host" if missing else ""

    def render(self, job: Job) -> Rendered:
        """Returns the command that starts all hosts. `submit` replaces RUN in the names of its files."""
        names = ",".join(host.host for host in assignment_of(job).hosts)
        words = ("pdsh", "-S", "-N", "-R", "ssh", "-f", str(_FAN_OUT), "-w", names)
        return Rendered(job, job.target.command, steps=((*words, shell_line(job, "stored", _name("RUN"))),))

    def submit(self, rendered: Rendered) -> BatchHandle:
        """Connects to all hosts over ssh. Each host checks what it would run, and stores the assignment.

        Raises:
            LaunchError: `launch-hosts`.
        """
        job = rendered.job
        run = secrets.token_hex(8)
        channels = HostChannels(job, [connect(job, at.host) for at in assignment_of(job).hosts])
        channels.prepare()
        try:
            messages = {}
            for node, host in enumerate(assignment_of(job).hosts):
                messages[node] = {"store": _name(run).replace("%h", host.host), "place": channels.place}
            channels.ask(messages)
        finally:
            channels.close()
        (step,) = rendered.steps
        command = [word.replace(_name("RUN"), _name(run)) for word in step]
        port = ["-p", str(job.reach.port)] if job.reach.port else []
        ssh_words = " ".join([*job.reach.args, *OPTIONS, *port])
        return BatchHandle(command, {**environment.snapshot(), "PDSH_SSH_ARGS_APPEND": ssh_words})


def _name(run: str) -> str:
    """Returns the name of the file with a host's assignment; pdsh replaces %h by the name of the host."""
    return f"paceline-{os.getuid()}-{run}-%h"


LAUNCHER = PdshLauncher()
