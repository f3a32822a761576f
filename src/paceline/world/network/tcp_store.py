"""Connects to the store at which the processes meet, for `rendezvous`. Rank 0 listens, or the agent of a launcher does."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.env import Variable
from paceline.base.errors import WorldError
from paceline.world.network import interface
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_dist: Any = dist  # torch's stubs lack its stores
_ANSWER_S = 2.0

environment.register(
    Variable(
        "TORCHELASTIC_USE_AGENT_STORE",
        environment.parse_bool,
        False,
        "Whether the launcher's agent listens at MASTER_PORT.",
    ),
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
        WorldError: `rendezvous-address`, `rendezvous-port`, `rendezvous-unreachable`.
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
            raise WorldError(
                "rendezvous-port",
                f"rank 0 cannot listen at {place}.",
                why=[str(error).splitlines()[0], f"address and port come from {world.source}"],
                fix="choose another port (--main-port, MASTER_PORT), or end the process that uses this one",
            ) from error
        return _stores[key]
    # If another program listens at the port and never answers, torch waits without a limit. So it waits in a thread.
    outcome: list[Store | RuntimeError] = []
    thread = threading.Thread(target=_connect_to, args=(world, seconds, outcome), daemon=True)
    thread.start()
    thread.join(seconds + 0.01)
    if not outcome or isinstance(outcome[0], RuntimeError):
        reason = "a program listens there, but it is no store of torch"
        if outcome:
            reason = str(outcome[0]).splitlines()[0]
        raise WorldError(
            "rendezvous-unreachable",
            f"rank {world.rank} could not reach rank 0 at {place} within {seconds:g} s.",
            why=[_resolution(world.address), reason],
            fix="check that rank 0 runs, that MASTER_ADDR names its host, and that no firewall closes the port",
        )
    _stores[key] = outcome[0]
    return outcome[0]


def _connect_to(world: World, seconds: float, outcome: list[Store | RuntimeError]) -> None:
    """Puts the store, or the error, into `outcome`."""
    try:
        outcome.append(_tcp_store(world, seconds, listens=False))
    except RuntimeError as error:
        outcome.append(error)


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
        return f"{address} is {socket.getaddrinfo(address, None)[0][4][0]}, seen from {socket.gethostname()}"
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
