"""Ports of this host at which launchers listen for each other."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from paceline.launch.host import hold_port


def lasting_port() -> int:
    """Returns a free port that will probably stay free; 0 if none is found.

    The system takes ports for outgoing connections, and for programs that bind port 0, from one range. A free port of that
    range may be in use a second later. Ports below the range are used only by programs that name them.
    """
    try:
        first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # not Linux
        return 0
    for _ in range(20):
        # Not with the module `random`: a script may seed it, and two runs would choose the same port.
        drawn = int.from_bytes(os.urandom(4), "big")
        port = 10_000 + drawn % max(int(first) - 10_000, 1)
        with suppress(OSError):
            hold_port(port).close()
            return port
    return 0


def listen_at(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at one address of this host, at a port (0: a free one).

    Raises:
        OSError: the address does not belong to this host, or the port cannot be used.
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
