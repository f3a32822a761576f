"""Processes become a group: `join` and `leave`.

Order of events in `join`, for more than one process:

    device      what this process computes on
    store       rank 0 listens at address:port, the others connect (`tcp_store.py`)
    roll call   rank 0 sees every rank arrive, compares what they bring, and names who is missing (`roll_call.py`)
    group       torch.distributed is initialised over a part of the store that is new with each roll call
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.errors import WorldError
from paceline.base.log import logger, warn_once
from paceline.torch_internals.groups import default_store
from paceline.world import device as devices
from paceline.world import runtime
from paceline.world.departures import announce
from paceline.world.network import interface, tcp_store
from paceline.world.roll_call import roll_call
from paceline.world.works import finish_threads
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

DEFAULT_TIMEOUT_S = 600.0
_dist: Any = dist  # torch's stubs lack its stores and debug levels


class Companion(Protocol):
    """What lives as long as this process is in its group, such as a thread that watches it."""

    def close(self, why: str) -> None:
        """Called as this process leaves, with why it does."""
        ...


C = TypeVar("C", bound=Companion)


@dataclass
class _Joined:
    """What this process holds while it is in a group."""

    store: Store
    ours: bool  # whether `join` made the group, so that `leave` may end it
    pid: int
    rank: int
    on_leave: list[Callable[[str], None]] = field(default_factory=list)
    companions: dict[type[Companion], Companion] = field(default_factory=dict)


_CONNECTED = "connected"  # how many ranks have the group up
_CONNECT_S = 10.0  # how long a rank waits for that as it ends
_LEFT = "left"  # how many ranks are done with it
_LEAVE_S = 3.0  # how long rank 0 waits for that
_UNFINISHED_S = 5.0  # how long a process waits, as it ends, for works that its script began and did not wait for
_UNFINISHED_AFTER_FAILURE_S = 0.5

_joined: _Joined | None = None
_before: dict[object, tuple[int, Callable[[], None]]] = {}  # what `leave` calls first, with the process that asked
atexit.register(lambda: leave(at_exit=True))


def join(
    world: World,
    *,
    cpu: bool = False,
    backend: str | None = None,
    timeout_s: float | None = None,
    device_index: int | None = None,
    store: Store | None = None,
) -> World:
    """Finds the device of this process and forms the process group of all of them.

    A group that stands already is used as it is. One process that no launcher started needs no group and gets none;
    one that was launched gets a group of one, so that `torch.distributed` answers its script.

    Args:
        world: who this process is.
        cpu: compute on the CPU even where there is an accelerator.
        backend: torch.distributed's backend; by default the device's own, with gloo for CPU tensors beside it.
        timeout_s: seconds until joining fails, and later any collective of the group; PACELINE_TIMEOUT_S, or 600.
        device_index: number of the accelerator; by default the local rank.
        store: a torch.distributed store that all ranks hold already, instead of one at the world's address.

    Returns:
        `world` with its device filled in.

    Ranks:
        All ranks call it. It returns once all have arrived; otherwise it raises within the timeout.

    Raises:
        WorldError: `device-missing`, `device-shared`, `device-mixed`, `backend-missing`, `group-mismatch`,
            `rendezvous-address`, `rendezvous-port`, `rendezvous-unreachable`, `rendezvous-missing`, `rendezvous-group`.
    """
    global _joined
    seconds = timeout(timeout_s)
    if dist.is_available() and dist.is_initialized():
        world = _adopt(world)
        device = runtime.current().device(world, cpu=cpu, index=device_index)
        devices.select(device)
        _current()
        return replace(world, device=str(device))
    device = runtime.current().device(world, cpu=cpu, index=device_index)
    devices.select(device)
    world = replace(world, device=str(device))
    if world.size == 1 and world.source == "single" and store is None:
        return world
    chosen = devices.default_backend(device, backend)
    if world.size == 1:
        own: Store = _dist.HashStore()
    else:
        root = store if store is not None else tcp_store.connect(world, seconds)
        interface.keep_gloo_on_loopback(interface.meeting_address(world))
        # torch's own keys of an earlier group in the same store, such as addresses of dead processes, must not be read.
        this_round = roll_call(root, world, device, chosen, seconds)
        own = _dist.PrefixStore(f"paceline/{this_round}", root)
    if chosen == "gloo":
        _lower_debug_level()
    _initialise(world, device, chosen, own, seconds)
    own.add(_CONNECTED, 1)
    _joined = _Joined(own, ours=True, pid=os.getpid(), rank=world.rank)
    return world


def leave(at_exit: bool = False) -> None:
    """Ends the group if `join` made it; a group that the user made stays. May be called at any time, and again.

    A save in the background ends first (`before_leaving`). Runs by itself when the interpreter ends.

    Args:
        at_exit: nothing comes after it, so that works in a group of the user's are waited for too.

    Ranks:
        Every rank for itself; the others must have finished their collectives with it.
    """
    global _joined
    while _before:
        pid, call = _before.pop(next(iter(_before)))
        if pid == os.getpid():  # a forked child inherits the table, and nothing of what it speaks of
            call()
    joined, _joined = _joined, None
    if joined is None or joined.pid != os.getpid():
        return
    # As the interpreter ends, the exception that ends it is no longer being handled: it is the last one shown.
    failure = sys.exception() or getattr(sys, "last_value", None)
    why = "has ended, or left"
    if failure is not None:
        why = f"has ended: {type(failure).__name__}: {failure}"
    for say_why in joined.on_leave:
        # It writes into the store; where rank 0 is gone, and the store with it, nobody is left to read it.
        with contextlib.suppress(dist.DistNetworkError):
            say_why(why)
    # A short script may be through before others have connected: they would fail if this rank closed its connections.
    if failure is None and joined.ours and dist.is_initialized() and store_answers(joined.store):
        _wait_for_all(joined.store, _CONNECTED, _CONNECT_S)
    # A group of the user's may go on after `end_training`.
    if (joined.ours or at_exit) and store_answers(joined.store):
        # Where the store ends at this very moment, rank 0 is gone and nobody is left to read.
        with contextlib.suppress(RuntimeError):
            announce(joined.store, joined.rank, failure)
            joined.store.add(_LEFT, 1)
    if not dist.is_initialized():
        return
    if joined.ours or at_exit:
        _finish_works(failure is not None)
    if not joined.ours:
        return
    # The store ends with rank 0.
    if failure is None and dist.get_rank() == 0:
        _wait_for_all(joined.store, _LEFT, _LEAVE_S)
    # After an error peers may be gone, and NCCL would wait for them.
    if failure is None or dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _finish_works(failed: bool) -> None:
    """Waits a while for asynchronous works that the script did not wait for; says so where some do not end."""
    patience_s = _UNFINISHED_AFTER_FAILURE_S if failed else _UNFINISHED_S
    if finish_threads(patience_s) or failed:
        return
    logger("world").warning(
        "rank %d ends while a collective that its script began with async_op=True is not finished (waited for %g s). "
        "Keep what the call returns, call wait() on it before the script ends, and let every rank make the call.",
        dist.get_rank(), _UNFINISHED_S,
    )  # fmt: skip


def _wait_for_all(store: Store, key: str, seconds: float) -> None:
    """Waits a while until all ranks have counted themselves under a key."""
    size = dist.get_world_size()
    until = time.monotonic() + seconds
    try:
        while store.add(key, 0) < size and time.monotonic() < until:
            time.sleep(0.01)
    except dist.DistNetworkError:  # the store has ended: nobody can be waiting for it
        return


def before_leaving(call: Callable[[], None]) -> Callable[[], None]:
    """Has `leave` call `call` first, while the group stands, and also where there is none. Returns what takes it back."""
    key = object()
    _before[key] = (os.getpid(), call)

    def forget() -> None:
        _before.pop(key, None)

    return forget


def on_leave(call: Callable[[str], None]) -> None:
    """Has `leave` call `call` first, with why this process leaves."""
    _current().on_leave.append(call)


def accompany(companion: Companion) -> None:
    """Keeps an object until this process leaves its group, in the place of an earlier one of its class."""
    _current().companions[type(companion)] = companion
    on_leave(companion.close)


def companion_of(kind: type[C]) -> C | None:
    """The object of this class that `accompany` keeps; None where there is none, as in a forked child."""
    if _joined is None or _joined.pid != os.getpid():
        return None
    return cast("C | None", _joined.companions.get(kind))


def part(name: str) -> Store:
    """A part of its own of the store behind the current group, which must stand."""
    prefixed: Store = _dist.PrefixStore(name, _current().store)
    return prefixed


def store() -> Store:
    """The store behind the current group, which must stand."""
    return _current().store


def store_answers(at: Store | None = None) -> bool:
    """Whether the store (by default that behind the current group) is still there."""
    return tcp_store.answers(_current().store if at is None else at)


def timeout(timeout_s: float | None = None) -> float:
    """Seconds until a collective counts as stuck: `timeout_s`, else PACELINE_TIMEOUT_S, else 600."""
    if timeout_s is None:
        timeout_s = environment.get("PACELINE_TIMEOUT_S")
    return DEFAULT_TIMEOUT_S if timeout_s is None else float(timeout_s)


def _current() -> _Joined:
    """What is known of the group that stands; one that the user made becomes known here."""
    global _joined
    if _joined is None or _joined.pid != os.getpid():
        _joined = _Joined(default_store(), ours=False, pid=os.getpid(), rank=dist.get_rank())
    return _joined


def _lower_debug_level() -> None:
    """torch crashes as DistributedDataParallel is made over gloo in its DETAIL mode (`Logger::set_env_variables`)."""
    if _dist.get_debug_level() != _dist.DebugLevel.DETAIL:
        return
    warn_once(
        "world",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL is lowered to INFO: over gloo torch ends with a segmentation fault in that mode. "
        "To have each collective compared between ranks, use --debug (or PACELINE_DEBUG=1) instead.",
    )
    environment.export({"TORCH_DISTRIBUTED_DEBUG": "INFO"})
    _dist.set_debug_level(_dist.DebugLevel.INFO)


def _adopt(world: World) -> World:
    """The world as the group that stands already has it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if world.source == "single":
        # No launcher: the script numbered its processes itself.
        return replace(world, rank=rank, size=size, local_rank=rank, local_size=size, source="torch.distributed")
    if (world.rank, world.size) != (rank, size):
        raise WorldError(
            "group-mismatch",
            f"a process group of {size} stands already, in which this is rank {rank}; the launcher says rank "
            f"{world.rank} of {world.size}.",
            why=f"torch.distributed was initialised by the script; {world.source} set the other numbers",
            fix="drop the script's own init_process_group call, or give it the launcher's rank and world size",
        )
    return world


def _initialise(world: World, device: torch.device, backend: str, store: Store, seconds: float) -> None:
    # A backend that is bound to its device connects at once (NCCL); gloo serves the CPU beside it, and is not bound.
    bound = device if device.index is not None and not backend.endswith("gloo") else None
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=seconds),
            device_id=bound,
        )
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            "rendezvous-group",
            f"the {world.size} processes have met, but could not connect with each other over {backend}.",
            why=str(error).splitlines()[0],
            fix="name the network card that all hosts share in GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME on GPUs)",
        ) from error
