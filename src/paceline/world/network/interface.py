"""Which of this host's addresses the processes of a run listen at: as few as will do."""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import sys

from paceline.base import env as environment
from paceline.world.detect.torchrun import LOCAL_SIZE
from paceline.world.world import World

_LOOPBACK = "127.0.0.1"
_GLOO_CARD = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # of Linux: the address of a network card
_ANY_PORT = 9


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
    if address == _LOOPBACK and sys.platform.startswith("linux") and _GLOO_CARD not in environment.snapshot():
        environment.export({_GLOO_CARD: "lo"})


def own_addresses(peer: str) -> list[str]:
    """The addresses of this host at which other ranks may reach it, the likeliest first.

    Args:
        peer: a host that all ranks reach; "" where none is known.
    """
    card = environment.snapshot().get(_GLOO_CARD, "").partition(",")[0]
    if card and sys.platform.startswith("linux"):
        return [_address_of_card(card)]
    addresses = [_address_towards(peer), _resolved(socket.gethostname())]
    usable = [address for address in addresses if address]
    return list(dict.fromkeys(usable)) or [_LOOPBACK]


def is_loopback(address: str) -> bool:
    """Whether an address is of this host alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_of_card(name: str) -> str:
    """The first address of a network card, such as "eth0".

    Raises:
        OSError: there is no such card, or it has no address.
    """
    import fcntl  # unknown on Windows

    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def _address_towards(peer: str) -> str:
    """This host's address on the way to another; "" where there is no way. Nothing is sent."""
    try:
        row = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(row[0], socket.SOCK_DGRAM) as probe:
            probe.connect(row[4])
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


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
