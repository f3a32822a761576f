"""Hosts reached over OpenSSH, one connection each, which carries the assignment, the output and the end.

Nothing of the run stands on the command line but where Python is. A host that is this one needs no ssh.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
from collections.abc import Sequence

from paceline.launch import host
from paceline.launch.launcher import Hosts, Job, Outcome, Rendered
from paceline.launch.remote.channels import HostChannels

REMOTE = "paceline.launch.remote"
# Nobody is there to answer a question, and a host that is gone is to be noticed within 15 seconds.
OPTIONS = (
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3",
)  # fmt: skip


class SshLauncher:
    """Starts a job on other hosts over OpenSSH."""

    name = "ssh"
    hosts: Hosts = "named"

    def available(self) -> str:
        """What is missing on this host."""
        return "" if shutil.which("ssh") else "there is no ssh on this host (openssh-client)"

    def render(self, job: Job) -> Rendered:
        """What this host runs to reach each of the others."""
        return Rendered(job, job.target.command, steps=tuple(connect(job, at.host) for at in job.assigned.hosts))

    def submit(self, rendered: Rendered) -> SshHandle:
        """Reaches all hosts and has each look at what it would run.

        Raises:
            LaunchError: `launch-hosts`.
        """
        return SshHandle(rendered)


class SshHandle:
    """A job on other hosts, which wait for the word to begin."""

    def __init__(self, rendered: Rendered) -> None:
        job = rendered.job
        self._channels = HostChannels(job, connections(job))
        try:
            self._place = self._channels.prepare()
        except BaseException:
            self._channels.close()
            raise

    def wait(self) -> Outcome:
        """Runs the job to its end.

        Raises:
            LaunchError: `launch-host-lost`.
        """
        try:
            return Outcome(self._channels.follow(self._place))
        finally:
            self._channels.close()


def connections(job: Job, module: str = REMOTE) -> list[tuple[str, ...]]:
    """What carries the connection to each host of a job; to this one no ssh.

    Args:
        job: the job, with its assignment.
        module: what runs there: a module of ours that answers on its standard output.
    """
    commands = []
    for at in job.assigned.hosts:
        is_near = _is_this_host(at.host, job)
        commands.append(here(job, module) if is_near else connect(job, at.host, module))
    return commands


def connect(job: Job, name: str, module: str = REMOTE) -> tuple[str, ...]:
    """What carries the connection to a host."""
    port = ["-p", str(job.reach.port)] if job.reach.port else []
    return ("ssh", *job.reach.args, "-T", *OPTIONS, *port, name, shell_line(job, module=module))


def shell_line(job: Job, *words: str, module: str = REMOTE) -> str:
    """What a host's shell is given: Python, found as here or in the environment that a script sets up."""
    path = job.assignment.env.get("PYTHONPATH", "") if job.assignment is not None else ""
    variables = ["env", f"PYTHONPATH={path}"] if path else []
    if not job.reach.activate:
        return shlex.join(["exec", *variables, sys.executable, "-u", "-m", module, *words])
    inside = shlex.join(["exec", *variables, "python", "-u", "-m", module, *words])
    return shlex.join(["exec", "bash", "-c", f". {shlex.quote(job.reach.activate)} && {inside}"])


def here(job: Job, module: str = REMOTE) -> tuple[str, ...]:
    """What carries the connection to this host."""
    return ("sh", "-c", shell_line(job, module=module))


def _is_this_host(name: str, job: Job) -> bool:
    """Whether a name is this host's own; at a port of its own, it may be that of a container."""
    if job.reach.port not in (None, 22):
        return False
    return is_local(name)


def is_local(name: str, known: Sequence[str] = ("localhost", "127.0.0.1")) -> bool:
    """Whether a name is one of this host's."""
    own = host.name()
    if name in (*known, own, own.partition(".")[0]):
        return True
    try:
        address = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is longer than DNS allows
        return False
    return not address.startswith("127.")


LAUNCHER = SshLauncher()
