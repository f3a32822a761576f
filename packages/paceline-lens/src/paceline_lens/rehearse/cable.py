"""`HostsWithCable`: network namespaces of this machine that stand for hosts, so that the link of one can be cut.

    [ switch ]  a bridge in a namespace of its own
     |port0   |port1        `cut` takes the port of the last host down: no packet passes, and nobody is told
    eth0     eth0
    10.78.0.1 10.78.0.2     a namespace for each host; the network of the machine itself is not changed

It needs Linux, root and `ip`. The processes see no other network, so a script that downloads something cannot be run here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence

from paceline.base import env as environment
from paceline.base.errors import LaunchError


def _path() -> str:
    """Returns where programs are looked for; `ip` may be where only the administrator's shell looks."""
    return os.pathsep.join((environment.snapshot().get("PATH", ""), "/usr/sbin", "/sbin"))


def obstacle() -> str:
    """Returns why no link can be cut on this machine; "" if it can."""
    if shutil.which("ip", path=_path()) is None:
        return "it needs network namespaces, and `ip` (iproute2) is not installed"
    if os.geteuid() != 0:
        return "it needs network namespaces, which only root may make"
    name = f"paceline-{secrets.token_hex(3)}"
    made = _ip("netns", "add", name)
    _ip("netns", "delete", name)
    return f"this system makes no network namespace ({made.stderr.strip()})" if made.returncode else ""


class HostsWithCable:
    """Hosts at one switch.

    Args:
        count: how many.

    Raises:
        LaunchError: `rehearse-link`.
    """

    def __init__(self, count: int) -> None:
        prefix = f"paceline-{secrets.token_hex(3)}"
        self._switch = f"{prefix}-switch"
        self._hosts = [f"{prefix}-{number}" for number in range(count)]
        self._made: list[str] = []
        try:
            self._make()
        except LaunchError:
            self.remove()
            raise

    def address(self, number: int) -> str:
        """Returns the address of a host."""
        return f"10.78.0.{number + 1}"

    def prefix(self, number: int) -> Sequence[str]:
        """Returns the words before a command that runs it on a host."""
        ip = shutil.which("ip", path=_path()) or "ip"
        return [ip, "netns", "exec", self._hosts[number], "env", "GLOO_SOCKET_IFNAME=eth0"]

    def cut(self) -> None:
        """Cuts the link of the last host."""
        _do("-n", self._switch, "link", "set", f"port{len(self._hosts) - 1}", "down")

    def mend(self) -> None:
        """Joins the link again."""
        _do("-n", self._switch, "link", "set", f"port{len(self._hosts) - 1}", "up")

    def remove(self) -> None:
        """Removes everything. What is removed in vain is gone already."""
        for name in self._made:
            _ip("netns", "delete", name)

    def _make(self) -> None:
        for name in (self._switch, *self._hosts):
            _do("netns", "add", name)
            self._made.append(name)
            _do("-n", name, "link", "set", "lo", "up")
        _do("-n", self._switch, "link", "add", "name", "bridge", "type", "bridge")
        _do("-n", self._switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self._hosts):
            port = f"port{number}"
            _do("-n", self._switch, "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _do("-n", self._switch, "link", "set", port, "master", "bridge")
            _do("-n", self._switch, "link", "set", port, "up")
            _do("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _do("-n", name, "link", "set", "eth0", "up")


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *words],
        env={**environment.snapshot(), "PATH": _path()},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def _do(*words: str) -> None:
    done = _ip(*words)
    if done.returncode:
        raise LaunchError(
            "rehearse-link",
            "hosts with a link that can be cut could not be made.",
            why=f"`ip {' '.join(words)}`: {done.stderr.strip()}",
            fix="rehearse the other failures: `--failures rank,hang,host,preempt`",
        )
