"""`join` forms the process group, and `leave` ends it.

The steps of `join`, for more than one process:

    device      the process selects the device on which it computes
    meeting     store, roll call and group (`meeting.py`)
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.errors import WorldError
from paceline.torch_internals.groups import default_store
from paceline.world import device as devices
from paceline.world import lifetime
from paceline.world.lifetime import Leaving
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

DEFAULT_TIMEOUT_S = 600.0
_dist: Any = dist  # torch's stubs lack its stores and debug levels


@dataclass
class _JoinedGroup:
    """What this process keeps while it is in a group."""

    store: Store
    ours: bool  # whether `join` made the group, so that `leave` may end it
    pid: int
    rank: int


_joined: _JoinedGroup | None = None
atexit.register(lambda: leave(at_exit=True))


def join(
    world: World,
    *,
    cpu: bool = False,
    backend: str | None = None,
    timeout_s: float | None = None,
    store: Store | None = None,
    needs_group: bool = False,
    detect: Callable[..., torch.device] = devices.detect,
) -> World:
    """Finds the device of this process and forms the process group of all processes.

    A group that the script has initialised already is used as it is. A single process that no launcher started needs no
    group and gets none. A single process that was launched gets a group of one, because its script may use
    `torch.distributed`.

    Args:
        world: who this process is.
        cpu: compute on the CPU even where there is an accelerator.
        backend: torch.distributed's backend; by default the device's own, with gloo for CPU tensors beside it.
        timeout_s: seconds until joining fails, and later any collective of the group; PACELINE_TIMEOUT_S, or 600.
        store: a torch.distributed store that all ranks hold already, instead of one at the world's address.
        needs_group: whether a single process that no launcher started gets a group, too.
        detect: finds the device, as `device.detect` does.

    Returns:
        `world` with its device filled in.

    Ranks:
        All ranks call it. It returns once all have arrived; otherwise it raises within the timeout.

    Raises:
        WorldError: `device-missing`, `device-shared`, `device-mixed`, `backend-missing`, `group-mismatch`,
            `rendezvous-address`, `rendezvous-port`, `rendezvous-unreachable`, `rendezvous-missing`, `rendezvous-group`,
            `world-child`.
    """
    seconds = timeout(timeout_s)
    if dist.is_available() and dist.is_initialized():
        if _joined is not None and _joined.pid != os.getpid() and dist.get_world_size() > 1:
            # A fork of a rank: it shares the connections of its parent, whose messages it would read.
            from paceline.world import children  # this ends the process

            raise children.of(_joined.rank, _joined.pid)
        world = _adopt(world)
        device = detect(world, cpu=cpu)
        devices.select(device)
        _current()
        return replace(world, device=str(device))
    device = detect(world, cpu=cpu)
    devices.select(device)
    world = replace(world, device=str(device))
    if world.size == 1 and world.source == "single" and store is None and not needs_group:
        return world
    # Loaded here: most processes that no launcher started are alone, and meet nobody.
    from paceline.world.leaving import note_connected
    from paceline.world.meeting import meet

    own = meet(world, device, devices.default_backend(device, backend), seconds, store)
    note_connected(own)
    _keep(_JoinedGroup(own, ours=True, pid=os.getpid(), rank=world.rank))
    return world


def _keep(joined: _JoinedGroup) -> None:
    global _joined
    _joined = joined
    lifetime.of_process().group.subscribe(lambda leaving: _leave_group(joined, leaving))


def leave(at_exit: bool = False) -> None:
    """Ends the group if `join` made it; a group that the user made stays. It may be called at any time, and again.

    `lifetime.py` lists what ends, and in which order. `leave` also runs when the interpreter ends.

    Args:
        at_exit: whether the interpreter ends. Then `leave` also waits for works in a group that the user made.

    Ranks:
        Each rank calls it for itself. The other ranks must have finished their collectives with this one.
    """
    # In an exit handler the exception that ends the script is no longer being handled; Python keeps it in `last_value`.
    failure = sys.exception() or getattr(sys, "last_value", None)
    lifetime.of_process().end(Leaving(failure, at_exit))


def _leave_group(joined: _JoinedGroup, leaving: Leaving) -> None:
    """Ends the group itself, as the last of what `lifetime.py` lists."""
    global _joined
    if joined is not _joined:
        return  # the script has destroyed this group itself, and then formed another
    _joined = None
    # A group that the user made may be used after `end_training`, so only at exit this rank has left it.
    if not joined.ours and not leaving.at_exit:
        return
    from paceline.world.leaving import leave_group  # a process that is in no group leaves none

    # The script may have destroyed the group itself.
    leave_group(joined.store, joined.rank, leaving.failure, destroys=joined.ours and dist.is_initialized())


def part(name: str) -> Store:
    """Returns a part of the current group's store, in which `name` stands before each key. The group must exist."""
    prefixed: Store = _dist.PrefixStore(name, _current().store)
    return prefixed


def store() -> Store:
    """Returns the store of the current group, which must exist."""
    return _current().store


def store_answers(at: Store | None = None) -> bool:
    """Returns whether the store (by default that of the current group) still answers."""
    if at is None:
        at = _current().store
    from paceline.world.network import tcp_store  # whoever has a group has loaded it

    return tcp_store.answers(at)


def timeout(timeout_s: float | None = None) -> float:
    """Seconds until a collective counts as stuck: `timeout_s`, else PACELINE_TIMEOUT_S, else 600."""
    if timeout_s is None:
        timeout_s = environment.get("PACELINE_TIMEOUT_S")
    if timeout_s is None:
        return DEFAULT_TIMEOUT_S
    return float(timeout_s)


def _current() -> _JoinedGroup:
    """Returns what is kept about the current group; for a group that the user made, this is created here."""
    if _joined is None or _joined.pid != os.getpid():
        _keep(_JoinedGroup(default_store(), ours=False, pid=os.getpid(), rank=dist.get_rank()))
    assert _joined is not None
    return _joined


def _adopt(world: World) -> World:
    """Returns the world with the numbers of the group that the script has initialised."""
    rank = dist.get_rank()
    size = dist.get_world_size()
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
