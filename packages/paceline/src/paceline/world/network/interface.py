"""Chooses the addresses at which the processes of a run listen, for `tcp_store` and `links`; as few as possible."""

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
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # the request of Linux for the address of a network interface
_ANY_PORT = 9


def meeting_address(world: World) -> str:
    """Returns the address at which rank 0 listens: loopback if all ranks are on this host, else the address of the world.

    Ranks:
        All ranks get the same address, because all know from the launcher how many ranks their host runs.
    """
    # Without one of these variables, `local_size` is only a guess.
    env = environment.snapshot()
    local_size_is_known = world.source == "slurm" or any(name in env for name in LOCAL_SIZE)
    all_here = local_size_is_known and world.local_size == world.size
    if all_here and world.address and _resolved(world.address) and _resolved(_LOOPBACK):
        return _LOOPBACK
    return world.address or ""


def listen(address: str, port: int) -> int | None:
    """Returns a file descriptor that listens at one address only; None if this host cannot listen at that address.

    That is the case if the address is forwarded to this host (a service of Kubernetes), or if the name is loopback on this host
    but not on the others. The caller must then listen on all interfaces, as torch does by default.

    Raises:
        OSError: the port cannot be used.
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
    """Lets gloo listen on loopback only, if the ranks meet there.

    gloo connects every pair of ranks. It reads the interface only from a variable, whenever a group is created. A value that
    the user has set stays.
    """
    if address == _LOOPBACK and sys.platform.startswith("linux") and _GLOO_INTERFACE not in environment.snapshot():
        environment.export({_GLOO_INTERFACE: "lo"})


def own_addresses(peer: str) -> list[str]:
    """Returns the addresses of this host at which other ranks may reach it; the most probable one comes first.

    Args:
        peer: a host that all ranks can reach; "" if none is known.
    """
    name = environment.snapshot().get(_GLOO_INTERFACE, "").partition(",")[0]
    if name and sys.platform.startswith("linux"):
        return [address_of_interface(name)]
    addresses = [address_towards(peer), _resolved(socket.gethostname())]
    usable = [address for address in addresses if address]
    return list(dict.fromkeys(usable)) or [_LOOPBACK]


def is_loopback(address: str) -> bool:
    """Returns whether an address can be reached only from its own host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_of_interface(name: str) -> str:
    """Returns the first address of a network interface, such as "eth0".

    Raises:
        OSError: there is no such interface, or it has no address.
    """
    import fcntl  # Windows does not have it

    # The request and the answer are a `struct ifreq`: 16 bytes with the name, then the address, whose last 4 bytes are the
    # IPv4 address.
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def address_towards(peer: str) -> str:
    """Returns the address of this host on the route to another one; "" if there is no route. Nothing is sent."""
    try:
        row = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(row[0], socket.SOCK_DGRAM) as probe:
            probe.connect(row[4])
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def _resolved(address: str) -> str:
    """Returns an address or name of this host as a numeric address; "" if it does not belong to this host."""
    try:
        rows = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a part of the name is longer than DNS allows
        return ""
    # An IPv4 address is preferred.
    row = min(rows, key=lambda row: row[0] != socket.AF_INET)
    resolved = str(row[4][0])
    with socket.socket(row[0], socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((resolved, 0))
        except OSError:
            return ""
    return resolved
