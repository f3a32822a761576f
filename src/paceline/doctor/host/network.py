"""Facts about a host's network: its interfaces, its own name, the way to the other hosts, and what names cost."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.base import env as environment
from paceline.doctor.facts import Interface, Lookup, Network
from paceline.launch import host

LOOKUP_S = 6.0  # glibc asks a name server for 5 s before it tries again
_IS_UP = 1  # of the flags of an interface
_OF_THIS_HOST_ALONE = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel")
_MOST_ADDRESSES = 6  # each is tried by each other host
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


def network(addresses: Mapping[str, Sequence[str]], hostname_addresses: Sequence[str]) -> Network:
    """How this host is connected.

    Args:
        addresses: the addresses of each other host, by its name.
        hostname_addresses: what `own_addresses` gave.
    """
    cards = interfaces()
    env = environment.snapshot()
    routes = []
    for name, candidates in addresses.items():
        card = _route(candidates, cards)
        if card:
            routes.append((name, card))
    return Network(
        host.name(),
        tuple(hostname_addresses),
        cards,
        tuple(routes),
        env.get("GLOO_SOCKET_IFNAME", ""),
        env.get("NCCL_SOCKET_IFNAME", ""),
    )


def interfaces() -> tuple[Interface, ...]:
    """All network interfaces, in the order of the system's list."""
    cards = []
    sixth = _ipv6_addresses()
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net", name)
        addresses = [*_ipv4_address(name), *sixth.get(name, ())]
        flags = _number(folder / "flags", 16)
        is_up = bool(addresses) if flags is None else bool(flags & _IS_UP)
        speed = _number(folder / "speed", 10)
        cards.append(Interface(name, tuple(addresses), is_up, speed if speed and speed > 0 else None))
    return tuple(cards)


def _ipv4_address(name: str) -> list[str]:
    try:
        import fcntl
    except ImportError:  # Windows has another way, which nobody has asked for
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        reply = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
        return [socket.inet_ntoa(reply[20:24])]
    return []


def _ipv6_addresses() -> dict[str, list[str]]:
    """Addresses by interface, those left out that are valid on one cable alone."""
    addresses: dict[str, list[str]] = {}
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            if not address.startswith("fe80:"):
                addresses.setdefault(name, []).append(address)
    return addresses


def _number(path: Path, base: int) -> int | None:
    """The number in a file of the system; None where it says nothing, as the speed of a link that is down."""
    try:
        return int(path.read_text().strip(), base)
    except (OSError, ValueError):
        return None


def reachable_at(towards: Sequence[str]) -> list[str]:
    """Under which addresses the others may reach this host, the likeliest first; no name is looked up for it.

    Args:
        towards: an address of each other host.
    """
    # What ssh says is where somebody else has reached this host.
    candidates = environment.snapshot().get("SSH_CONNECTION", "").split()[2:3]
    candidates += [own for own in map(host.address_towards, towards) if own]
    for card in interfaces():
        if card.is_up and not card.name.startswith(_OF_THIS_HOST_ALONE):
            candidates += card.addresses
    usable = [address for address in candidates if not address.startswith("127.") and address != "::1"]
    return list(dict.fromkeys(usable))[:_MOST_ADDRESSES]


def own_addresses(timeout_s: float = LOOKUP_S) -> tuple[str, ...]:
    """The addresses that this host's own name has here; none where there is no answer in time."""
    answers: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):  # UnicodeError: a part of the name is longer than DNS allows
            for row in socket.getaddrinfo(host.name(), None, type=socket.SOCK_STREAM):
                answers.append(str(row[4][0]))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return tuple(dict.fromkeys(answers))


def _route(candidates: Sequence[str], cards: Sequence[Interface]) -> str:
    """The interface by which this host goes to the first of another's addresses that a route leads to; "" for none."""
    for address in candidates:
        own = host.address_towards(address)
        if own:
            return next((card.name for card in cards if own in card.addresses), "")
    return ""


def lookups(names: Mapping[str, Sequence[str]], timeout_s: float = LOOKUP_S) -> tuple[Lookup, ...]:
    """Asks for the address of each other host's own name, and for the name of its address, all at the same time.

    torch's store asks for the name of each client that connects, in the form that IPv6 has for addresses of IPv4.

    Args:
        names: by host: its own name, and the address that the others use.
        timeout_s: how long to wait; a question that is still open then counts as unanswered.
    """
    questions: list[tuple[str, str, Callable[[str], str]]] = []
    for name, (hostname, address) in names.items():
        questions.append((name, hostname, _address_of))
        if address:
            questions.append((name, address, _name_of))
            if ":" not in address:
                questions.append((name, f"::ffff:{address}", _name_of))
    rows: dict[int, Lookup] = {}
    begun = time.monotonic()

    def ask(number: int, name: str, question: str, resolve: Callable[[str], str]) -> None:
        answer = resolve(question)
        rows[number] = Lookup(name, question, answer, time.monotonic() - begun)

    # The resolver cannot be interrupted: the threads are left to themselves where it takes too long.
    threads = [
        threading.Thread(target=ask, args=(number, *question), daemon=True) for number, question in enumerate(questions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(begun + timeout_s - time.monotonic(), 0.0))
    answered = dict(rows)
    complete = []
    for number, (name, question, _) in enumerate(questions):
        complete.append(answered.get(number) or Lookup(name, question, "", timeout_s, finished=False))
    return tuple(complete)


def _address_of(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return ""


def _name_of(address: str) -> str:
    try:
        return socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        return ""
