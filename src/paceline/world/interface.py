"""Which of this host's addresses the processes of a run listen at: as few as will do."""

from __future__ import annotations

import errno
import socket
import sys

from paceline.base import env as environment
from paceline.world.detect.torchrun import LOCAL_SIZE
from paceline.world.world import World

_LOOPBACK = "127.0.0.1"


def meeting_address(world: World) -> str:
    """Where rank 0 listens: loopback where all ranks are on this host, else the world's own address.

    Ranks:
        All ranks get the same, as they were all told how many there are on their host.
    """
    # Where no variable says how many ranks this host runs, the world's number of them is only a guess.
    env = environment.snapshot()
    is_told = world.source == "slurm" or any(name in env for name in LOCAL_SIZE)
    all_here = is_told and world.local_size == world.size
    if all_here and world.address and _resolved(world.address) and _resolved(_LOOPBACK):
        return _LOOPBACK
    return world.address or ""


def listen(address: str, port: int) -> int | None:
    """A file descriptor that listens at one address alone; None where that one is of no use to listen at.

    That is so where the address is forwarded here from elsewhere (a service of Kubernetes), and where a name means loopback
    on this host and something else on the others. Whoever listens then does so on all interfaces, as torch would.

    Raises:
        OSError: the port cannot be had.
    """
    resolved = address if address == _LOOPBACK else _resolved(address)
    if not resolved or (resolved.startswith("127.") and address != _LOOPBACK):
        return None
    family = socket.AF_INET6 if ":" in resolved else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((resolved, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return listener.detach()


def keep_gloo_on_loopback(address: str) -> None:
    """Has gloo, whose every pair of ranks has a connection, listen on loopback too, where the ranks meet there.

    gloo reads this variable whenever a group is made, and takes it in no other way. A value of the user's stays.
    """
    name = "GLOO_SOCKET_IFNAME"
    if address == _LOOPBACK and sys.platform.startswith("linux") and name not in environment.snapshot():
        environment.export({name: "lo"})


def _resolved(address: str) -> str:
    """An address of this host as numbers; "" where it is none of this host's."""
    try:
        rows = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is longer than DNS allows
        return ""
    row = min(rows, key=lambda row: row[0] != socket.AF_INET)
    resolved = str(row[4][0])
    with socket.socket(row[0], socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((resolved, 0))
        except OSError:
            return ""
    return resolved
