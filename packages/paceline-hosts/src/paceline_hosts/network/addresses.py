"""Addresses of hosts and launchers: which host is this one, where a run may be found, and where this launcher listens."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from paceline.base.errors import LaunchError
from paceline.base.host_port import host_and_port
from paceline.launch import host
from paceline.launch.job import Job
from paceline.launch.rounds import Place
from paceline.world.detect.kubernetes import in_pod
from paceline.world.network.interface import address_towards
from paceline_hosts.network.ports import listen_at

_POD_RETRY_S = 0.5
_CONNECT_TIMEOUT_S = 2.0


def is_this_host(address_or_name: str) -> bool:
    """Returns whether a name, or the address to which it resolves, belongs to this host."""
    own = host.name()
    if address_or_name in ("localhost", "127.0.0.1", own, own.partition(".")[0]):
        return True
    try:
        address = socket.gethostbyname(address_or_name)
        # A socket can only be bound to an address of this host.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError):
        return False  # a UnicodeError means that a part of the name is longer than DNS allows
    return not address.startswith("127.")


def await_main_address(job: Job, env: Mapping[str, str], timeout_s: float) -> None:
    """In a pod, waits until the name of node 0 leads to a launcher that listens, or to this pod itself.

    The name server learns the name of a new pod some seconds late, and may give the address of an old pod until then.
    The function returns without an error after the timeout: whoever needs the address reports what is wrong with it.

    Args:
        job: the job of one of several nodes.
        env: the environment of this process.
        timeout_s: how long to wait.
    """
    if not in_pod(env) or not job.numbered or "," in job.main_address:
        return
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError):
            if job.node_rank == 0:
                socket.getaddrinfo(job.main_address, job.main_port)
                return
            # The launcher that listens there drops a connection that says nothing, so this does no harm.
            socket.create_connection((job.main_address, job.main_port), _CONNECT_TIMEOUT_S).close()
            return
        time.sleep(_POD_RETRY_S)


def main_places(job: Job) -> list[Place]:
    """Returns the addresses and ports of `--main-address`, where a run may be found. Names are resolved.

    Raises:
        LaunchError: `launch-address`, where no name can be resolved.
    """
    places: list[Place] = []
    problems: list[str] = []
    for text in job.main_address.split(","):
        name, port = host_and_port(text)
        try:
            places.append(resolve(name, int(port or job.main_port)))
        except (OSError, ValueError) as error:
            problems.append(f"{text}: {str(error.args[-1]).lower()}")
    if not places:
        raise LaunchError(
            "launch-address",
            "the name of node 0 cannot be resolved.",
            why=f"--main-address {'; '.join(problems)}",
            fix="give its IP address",
        )
    return places


def resolve(name: str, port: int) -> Place:
    """One address of a host: IPv4 where it has one.

    Raises:
        OSError: the host has no address.
    """
    rows = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    # False sorts before True, so this is the first IPv4 row, or the first row if there is none.
    chosen = min(rows, key=lambda row: row[0] != socket.AF_INET)
    address = chosen[4]
    return str(address[0]), int(address[1])


def listen(job: Job, places: Sequence[Place]) -> tuple[socket.socket, int | None]:
    """Listens at the place of `places` that belongs to this launcher, else at any free port.

    Returns:
        The socket, and the index of that place; None where no place belongs to this launcher.
    """
    candidates = list(range(len(places)))
    if job.numbered:
        # The places belong to the first nodes, in order.
        candidates = [job.node_rank] if job.node_rank < len(places) else []
    for index in candidates:
        address, port = places[index]
        listener = _bind(address, port, anywhere=job.numbered)
        if listener is not None:
            return listener, index
    return listen_towards(places), None


def listen_towards(places: Sequence[Place]) -> socket.socket:
    """Listens at a free port of the address from which this host reaches the first place that it has a route to."""
    for address, _ in places:
        own = address_towards(address)
        if own:
            with suppress(OSError):
                return listen_at(own, 0)
    listener = host.hold_port(0)  # there is no route to any of them yet
    listener.listen(128)
    return listener


def _bind(address: str, port: int, anywhere: bool) -> socket.socket | None:
    """Listens at a place; None where the address is not one of this host, or the port is in use.

    Args:
        address, port: the place.
        anywhere: whether to listen on all interfaces where the address is not one of this host: it may be the address
            of a gateway that forwards connections to this host.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    is_own_address = True
    # Only an address of this host can be bound. With a datagram socket the test does not depend on ports of TCP in use.
    with socket.socket(family, socket.SOCK_DGRAM) as test:
        try:
            test.bind((address, 0))
        except OSError:
            is_own_address = False
    if not is_own_address and not anywhere:
        return None
    try:
        # Debian resolves the name of the host itself to 127.0.1.1, where no other host can connect.
        if is_own_address and address != "127.0.1.1":
            return listen_at(address, port)
        sock = host.hold_port(port)
    except OSError:
        return None
    try:
        sock.listen(128)
    except OSError:
        sock.close()
        return None
    return sock
