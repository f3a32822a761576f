"""`join` forms the process group, and `leave` ends it.

The steps of `join`, for more than one process:

    device      the process selects the device on which it computes
    meeting     store, roll call and group (`meeting.py`)
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.base import env as environment
from paceline.base.errors import WorldError
from paceline.base.log import logger
from paceline.torch_internals.groups import default_store
from paceline.world import device as devices
from paceline.world import lifetime
from paceline.world.lifetime import Leaving
from paceline.world.mesh import forget_meshes
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


_CONNECTED = "connected"  # key of the store: how many ranks have initialised the group
_CONNECT_S = 10.0  # how long a rank that ends waits until all ranks have
_LEFT = "left"  # key of the store: how many ranks have finished with the group
_LEAVE_S = 3.0  # how long rank 0 waits until all ranks have
_READ_S = 1.0  # how much longer, so that ranks which waited for it can read who has left
_UNFINISHED_S = 5.0  # how long a process that ends waits for asynchronous works for which its script did not wait
_UNFINISHED_AFTER_FAILURE_S = 0.5

_joined: _JoinedGroup | None = None
atexit.register(lambda: leave(at_exit=True))


def join(
    world: World,
    *,
    cpu: bool = False,
    backend: str | None = None,
    timeout_s: float | None = None,
    store: Store | None = None,
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
    if world.size == 1 and world.source == "single" and store is None:
        return world
    # Loaded here: most processes that no launcher started are alone, and meet nobody.
    from paceline.world.meeting import meet

    own = meet(world, device, devices.default_backend(device, backend), seconds, store)
    own.add(_CONNECTED, 1)
    _keep(_JoinedGroup(own, ours=True, pid=os.getpid(), rank=world.rank))
    return world


def _keep(joined: _JoinedGroup) -> None:
    global _joined
    _joined = joined
    lifetime.of_process().group.at_end(lambda leaving: _leave_group(joined, leaving))


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
    """Ends the group itself, as the last of what `lifetime.py` lists.

    A short script may end before all ranks have connected, and they would fail if its connections closed. So it waits for them,
    tells the others that it leaves, finishes the works for which its script did not wait, and destroys the group.
    """
    global _joined
    if joined is not _joined:
        return  # the script has destroyed this group itself, and then formed another
    _joined = None
    # A group that the user made may be used after `end_training`, so only at exit this rank has left it.
    if not joined.ours and not leaving.at_exit:
        return
    # The script may have destroyed the group itself.
    is_ours = joined.ours and dist.is_initialized()
    if is_ours and leaving.failure is None:
        _wait_for_all(joined.store, _CONNECTED, dist.get_world_size(), _CONNECT_S)
    _say_goodbye(joined, leaving.failure)
    _finish_works(joined.rank, leaving.failure is not None)
    if is_ours:
        _destroy(joined, leaving.failure)


def _say_goodbye(joined: _JoinedGroup, failure: BaseException | None) -> None:
    """Writes down that this rank leaves, and why."""
    if not store_answers(joined.store):
        return
    from paceline.world.departures import announce  # a process that is in no group leaves none

    # The store may end between the check and this write. Then rank 0 is gone, and nobody is left to read it.
    with contextlib.suppress(RuntimeError):
        announce(joined.store, joined.rank, failure)
        joined.store.add(_LEFT, 1)


def _destroy(joined: _JoinedGroup, failure: BaseException | None) -> None:
    """Destroys the group. The store ends with rank 0, so rank 0 waits until the others do not need it any more."""
    size = dist.get_world_size()
    is_needed = failure is None and joined.rank == 0 and not _wait_for_all(joined.store, _LEFT, size, _LEAVE_S)
    # After an error the other ranks may be gone, and NCCL would wait for them as it destroys the group.
    if failure is None or dist.get_backend() == "gloo":
        dist.destroy_process_group()
        forget_meshes()
    if is_needed:
        # Another rank may wait for a message of this one. It fails as the connections are closed, and then reads in the store
        # who has left. Objects that refer to each other in a circle keep the connections open until they are collected.
        gc.collect()
        _wait_for_all(joined.store, _LEFT, size, _READ_S)


def _finish_works(rank: int, failed: bool) -> None:
    """Waits for asynchronous works for which the script did not wait, and warns if some do not end in time."""
    from paceline.world.works import finish_threads

    # After a failure the other ranks may be gone, and then a collective never ends.
    patience_s = _UNFINISHED_AFTER_FAILURE_S if failed else _UNFINISHED_S
    if finish_threads(patience_s) or failed:
        return
    logger("world").warning(
        "rank %d ends while a collective that its script began with async_op=True is not finished (waited for %g s). "
        "Keep what the call returns, call wait() on it before the script ends, and let every rank make the call.",
        rank, _UNFINISHED_S,
    )  # fmt: skip


def _wait_for_all(store: Store, key: str, size: int, seconds: float) -> bool:
    """Waits up to `seconds` until all `size` ranks have added themselves to the counter `key`. Returns whether they have."""
    if not store_answers(store):
        return True  # it has ended, so no rank that needs it is left
    until = time.monotonic() + seconds
    try:
        while store.add(key, 0) < size:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
    except dist.DistNetworkError:
        pass  # the same, a moment later
    return True


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
