"""Starts hosts over OpenSSH. One connection to each host carries the assignment, the output and the exit code.

The command line of a host only names the Python to start; everything else travels over the connection. The host on which
this command runs needs no ssh.
"""

from __future__ import annotations

import shlex
import shutil
import sys

from paceline.launch.job import Job
from paceline.launch.launcher import Hosts, Rendered
from paceline_hosts.assignment import assignment_of
from paceline_hosts.network.addresses import is_this_host
from paceline_hosts.remote.channels import HostChannels

REMOTE = "paceline_hosts.remote"
# ssh must not ask for a password, because nobody would answer. The alive messages notice a lost host within 15 seconds.
OPTIONS = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
)  # fmt: skip


class SshLauncher:
    """Starts a job on other hosts over OpenSSH."""

    name = "ssh"
    hosts: Hosts = "named"

    def available(self) -> str:
        """Returns what is missing on this host; "" if nothing is."""
        return "" if shutil.which("ssh") else "there is no ssh on this host (openssh-client)"

    def render(self, job: Job) -> Rendered:
        """Returns the commands that this host runs to reach each of the others."""
        steps = tuple(connect(job, at.host) for at in assignment_of(job).hosts)
        return Rendered(job, job.target.command, steps=steps)

    def submit(self, rendered: Rendered) -> HostChannels:
        """Connects to all hosts, each of which checks what it would run.

        Raises:
            LaunchError: `launch-hosts`.
        """
        channels = HostChannels(rendered.job, connections(rendered.job))
        channels.prepare()
        return channels


def connections(job: Job, module: str = REMOTE) -> list[tuple[str, ...]]:
    """Returns the command that connects to each host of a job; for this host a command without ssh.

    Args:
        job: the job, with its assignment.
        module: the module of Paceline that runs there, and answers on its standard output.
    """
    commands = []
    # At another port than ssh's own, the name of this host may reach a container on it.
    is_usual_port = job.reach.port in (None, 22)
    for at in assignment_of(job).hosts:
        is_here = is_usual_port and is_this_host(at.host)
        commands.append(here(job, module) if is_here else connect(job, at.host, module))
    return commands


def connect(job: Job, name: str, module: str = REMOTE) -> tuple[str, ...]:
    """Returns the command that connects to a host."""
    port = ["-p", str(job.reach.port)] if job.reach.port else []
    return ("ssh", *job.reach.args, "-T", *OPTIONS, *port, name, shell_line(job, module))


def shell_line(job: Job, module: str = REMOTE) -> str:
    """Returns the line for the shell of a host.

    It starts Python at the same path as here or, if `job.reach.activate` names a script, the Python that the script sets up.
    """
    path = job.assignment.env.get("PYTHONPATH", "") if job.assignment is not None else ""
    variables = ["env", f"PYTHONPATH={path}"] if path else []
    if not job.reach.activate:
        return shlex.join(["exec", *variables, sys.executable, "-u", "-m", module])
    inside = shlex.join(["exec", *variables, "python", "-u", "-m", module])
    return shlex.join(["exec", "bash", "-c", f". {shlex.quote(job.reach.activate)} && {inside}"])


def here(job: Job, module: str = REMOTE) -> tuple[str, ...]:
    """Returns the command that starts the agent on this host."""
    return ("sh", "-c", shell_line(job, module))


LAUNCHER = SshLauncher()
