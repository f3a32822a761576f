"""Collects the facts about a host's network: its interfaces, its own name, its routes, and how names are resolved."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.base import env as environment
from paceline.launch import host
from paceline.world.network.interface import address_of_interface, address_towards
from paceline_hosts.doctor.facts import Interface, LookupFacts, Network

LOOKUP_S = 6.0  # glibc asks a name server for 5 s before it tries again
_IS_UP = 1  # IFF_UP of Linux, a bit of the flags of an interface
# Beginnings of the names of interfaces that lead only to containers and virtual machines of the same host, or to itself.
_OF_THIS_HOST_ALONE = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel")
_MOST_ADDRESSES = 6  # each other host tries to connect to each of them


def network(addresses: Mapping[str, Sequence[str]], hostname_addresses: Sequence[str]) -> Network:
    """Returns how this host is connected.

    Args:
        addresses: name of each other host -> its addresses.
        hostname_addresses: the result of `own_addresses`.
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
    """Returns all network interfaces, in the order of the system's list."""
    cards = []
    ipv6_addresses = _ipv6_addresses()
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net", name)
        addresses = [*_ipv4_address(name), *ipv6_addresses.get(name, ())]
        # Without /sys (not on Linux), an interface that has an address counts as up.
        flags = _number(folder / "flags", 16)
        is_up = bool(addresses) if flags is None else bool(flags & _IS_UP)
        speed = _number(folder / "speed", 10)
        cards.append(Interface(name, tuple(addresses), is_up, speed if speed and speed > 0 else None))
    return tuple(cards)


def _ipv4_address(name: str) -> list[str]:
    try:
        return [address_of_interface(name)]
    except (OSError, ImportError):  # it has none; or this is Windows, where the system cannot be asked in this way
        return []


def _ipv6_addresses() -> dict[str, list[str]]:
    """Returns interface -> its IPv6 addresses, without link-local ones, which are valid only on one link."""
    addresses: dict[str, list[str]] = {}
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            if not address.startswith("fe80:"):
                addresses.setdefault(name, []).append(address)
    return addresses


def _number(path: Path, base: int) -> int | None:
    """Returns the number in a file of the system; None if the file has none, such as the speed of a link that is down."""
    try:
        return int(path.read_text().strip(), base)
    except (OSError, ValueError):
        return None


def reachable_at(towards: Sequence[str]) -> list[str]:
    """Returns the addresses by which the others may reach this host, the likeliest first, without looking up any name.

    Args:
        towards: an address of each other host.
    """
    # The third word of SSH_CONNECTION is the address by which the starter has reached this host, so it is known to work.
    candidates = environment.snapshot().get("SSH_CONNECTION", "").split()[2:3]
    candidates += [own for own in map(address_towards, towards) if own]
    for card in interfaces():
        if card.is_up and not card.name.startswith(_OF_THIS_HOST_ALONE):
            candidates += card.addresses
    usable = [address for address in candidates if not address.startswith("127.") and address != "::1"]
    return list(dict.fromkeys(usable))[:_MOST_ADDRESSES]


def own_addresses(timeout_s: float = LOOKUP_S) -> tuple[str, ...]:
    """Returns the addresses that this host's own name has on this host; none if there is no answer in time."""
    answers: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):  # UnicodeError: a part of the name is longer than DNS allows
            for row in socket.getaddrinfo(host.name(), None, type=socket.SOCK_STREAM):
                answers.append(str(row[4][0]))

    # The resolver has no timeout of its own that could be set here, so a thread asks, and is left behind if it is late.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return tuple(dict.fromkeys(answers))


def _route(candidates: Sequence[str], cards: Sequence[Interface]) -> str:
    """Returns the interface by which this host reaches another: for the first of its addresses with a route; "" for none."""
    for address in candidates:
        own = address_towards(address)
        if own:
            return next((card.name for card in cards if own in card.addresses), "")
    return ""


def lookups(names: Mapping[str, Sequence[str]], timeout_s: float = LOOKUP_S) -> tuple[LookupFacts, ...]:
    """Asks the resolver for the address of each other host's own name, and for the name of its address, all at once.

    torch's store asks for the name of each client that connects, with an IPv4 address in IPv6 form (`::ffff:10.0.0.1`), so
    this question is asked too.

    Args:
        names: host -> the name that it has for itself, and the address that the others use.
        timeout_s: how long to wait; a question that is open after that time counts as unanswered.
    """
    questions: list[tuple[str, str, Callable[[str], str]]] = []
    for name, (hostname, address) in names.items():
        questions.append((name, hostname, _address_of))
        if address:
            questions.append((name, address, _name_of))
            if ":" not in address:
                questions.append((name, f"::ffff:{address}", _name_of))
    rows: dict[int, LookupFacts] = {}
    begun = time.monotonic()

    def ask(number: int, name: str, question: str, resolve: Callable[[str], str]) -> None:
        answer = resolve(question)
        rows[number] = LookupFacts(name, question, answer, time.monotonic() - begun)

    # A call of the resolver cannot be interrupted, so threads that take too long are left behind.
    threads = [
        threading.Thread(target=ask, args=(number, *question), daemon=True) for number, question in enumerate(questions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(begun + timeout_s - time.monotonic(), 0.0))
    # A thread that was left behind may still add its answer, so the rest works with a copy.
    answered = dict(rows)
    complete = []
    for number, (name, question, _) in enumerate(questions):
        complete.append(answered.get(number) or LookupFacts(name, question, "", timeout_s, finished=False))
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
