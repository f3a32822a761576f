"""Connects to the store at which the processes meet, for `rendezvous`. Rank 0 listens, or the agent of a launcher does."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.env import Variable
from paceline.base.errors import WorldError
from paceline.base.log import logger
from paceline.torch_internals.groups import is_tcp_store
from paceline.world import children
from paceline.world.network import interface
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_dist: Any = dist  # torch's stubs lack its stores
_ANSWER_S = 2.0
_ATTEMPT_S = 10.0  # how long one attempt to connect may take; a program that never answers may make place for rank 0
_LEAST_PAUSE_S = 0.01  # between two attempts
_MOST_PAUSE_S = 0.5
_STRANGER = "a program listens there, but it is no store of torch"
NOTICE_S = 30.0  # a rank that has waited so long says for whom

environment.register(
    Variable(
        "TORCHELASTIC_USE_AGENT_STORE",
        environment.parse_bool,
        False,
        "Whether the launcher's agent listens at MASTER_PORT.",
    )
)

# Stores by process, address and port. Rank 0 listens until it ends, so that it can join again at the same port.
_stores: dict[tuple[int, str, int], Store] = {}


def keep(world: World, store: Store) -> None:
    """Registers a store, which listens or is connected already, as the one at the world's address."""
    _stores[os.getpid(), world.address or "", world.port or 0] = store


def connect(world: World, seconds: float) -> Store:
    """Returns the store at the world's address, and connects to it if necessary.

    Args:
        world: this process.
        seconds: how long it may take.

    Raises:
        WorldError: `rendezvous-address`, `rendezvous-port`, `rendezvous-unreachable`, `world-child`.
    """
    if not world.address or not world.port:
        missing = "port" if world.address else "address"
        raise WorldError(
            "rendezvous-address",
            f"{world.size} processes belong to this run, but the {missing} at which they meet is not known.",
            why=f"{world.source} gave address {world.address!r} and port {world.port!r}",
            fix="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, or use `paceline launch`",
        )
    key = (os.getpid(), world.address, world.port)
    if key in _stores:
        return _stores[key]
    place = f"{world.address}:{world.port}"
    if world.rank == 0 and not environment.get("TORCHELASTIC_USE_AGENT_STORE"):
        try:
            _stores[key] = _tcp_store(world, seconds, listens=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: torch's DistError family
            _refuse_child(world)
            raise WorldError(
                "rendezvous-port",
                f"rank 0 cannot listen at {place}.",
                why=[str(error).splitlines()[0], f"address and port come from {world.source}"],
                fix="choose another port (--main-port, MASTER_PORT), or end the process that uses this one",
            ) from error
        return _stores[key]
    # torch's client waits without a limit for a program that never answers, prints C++ frames if another answer comes, and
    # aborts Python if it is left in a thread. So it is created after the store has answered.
    until = time.monotonic() + seconds
    reason = _wait_for_store(world, until)
    if not reason:
        try:
            _stores[key] = _tcp_store(world, max(_ANSWER_S, until - time.monotonic()), listens=False)
            return _stores[key]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
    fix = "check that rank 0 runs, that MASTER_ADDR names its host, and that no firewall closes the port"
    if reason == _STRANGER:
        fix = "check that MASTER_ADDR names the host of rank 0; if so, give all ranks another port (--main-port, MASTER_PORT)"
    raise WorldError(
        "rendezvous-unreachable",
        f"rank {world.rank} could not reach rank 0 at {place} within {seconds:g} s.",
        why=[_resolution(world.address), reason],
        fix=fix,
    )


def _refuse_child(world: World) -> None:
    """Refuses this process if the program that listens in its place is the rank 0 that has started it."""
    place = (interface.meeting_address(world), world.port or 0)
    if not _why_no_store(place, _ANSWER_S):
        children.refuse(_tcp_store(world, _ANSWER_S, listens=False), world.rank)


def _wait_for_store(world: World, until: float) -> str:
    """Waits until torch's store listens at the world's address. Returns "", or why it does not."""
    place = (interface.meeting_address(world), world.port or 0)
    notice_at = time.monotonic() + NOTICE_S
    pause = _LEAST_PAUSE_S
    reason = "there was no time to try"
    while (left := until - time.monotonic()) > 0:
        reason = _why_no_store(place, min(left, _ATTEMPT_S))
        if not reason:
            return ""
        # One rank of each host says it, and rank 1 where rank 0 is missing on its own host.
        if time.monotonic() > notice_at and (world.local_rank == 0 or world.rank == 1):
            notice_at = until
            logger("world").warning(
                "rank %d has waited %g s for rank 0 at %s:%d, and waits %.0f s more (%s).",
                world.rank, NOTICE_S, *place, until - time.monotonic(), reason,
            )  # fmt: skip
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE_S)
    return reason


def _why_no_store(place: tuple[str, int], seconds: float) -> str:
    """Returns "" if torch's store listens at an address and port, else the reason why it cannot be used."""
    try:
        connection = socket.create_connection(place, seconds)
    except (OSError, UnicodeError) as error:
        return str(error)
    with connection:
        try:
            is_store = is_tcp_store(connection)
        except OSError:  # it closed the connection, or it never answers
            is_store = False
    return "" if is_store else _STRANGER


def _tcp_store(world: World, seconds: float, *, listens: bool) -> Store:
    limit = timedelta(seconds=seconds)
    address = interface.meeting_address(world)
    # By default torch's store listens on all interfaces, and everybody who can reach it may read and change all keys.
    listener = interface.listen(address, world.port or 0) if listens else None
    store: Store = _dist.TCPStore(
        address, world.port, world.size, listens, timeout=limit, wait_for_workers=False, master_listen_fd=listener
    )
    return store


def _resolution(address: str) -> str:
    try:
        resolved = socket.getaddrinfo(address, None)[0][4][0]
        return f"{socket.gethostname()} resolves {address} to {resolved}"
    except (OSError, UnicodeError) as error:
        return f"{socket.gethostname()} cannot resolve {address!r}: {error}"


def answers(store: Store) -> bool:
    """Returns whether a store still listens.

    It is asked before a use, because torch prints a page of C++ frames if a store is gone, even at the end of a good run.
    """
    store = _underlying(store)
    if not isinstance(store, _dist.TCPStore):
        return True
    try:
        socket.create_connection((store.host, store.port), _ANSWER_S).close()
    except OSError:
        return False
    return True


def host(store: Store) -> str:
    """Returns the host on which a store listens; "" if it is not on the network."""
    store = _underlying(store)
    return str(store.host) if isinstance(store, _dist.TCPStore) else ""


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
