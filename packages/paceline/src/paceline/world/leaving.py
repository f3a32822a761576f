"""How a rank leaves its group: it waits until all have connected, says goodbye, finishes its works, and destroys the group."""

from __future__ import annotations

import contextlib
import gc
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.base.log import logger
from paceline.world.departures import announce
from paceline.world.mesh import forget_meshes
from paceline.world.network import tcp_store
from paceline.world.works import finish_threads

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_CONNECTED = "connected"  # key of the store: how many ranks have initialised the group
_CONNECT_S = 10.0  # how long a rank that ends waits until all ranks have
_LEFT = "left"  # key of the store: how many ranks have finished with the group
_LEAVE_S = 3.0  # how long rank 0 waits until all ranks have
_READ_S = 1.0  # how much longer, so that ranks which waited for it can read who has left
_UNFINISHED_S = 5.0  # how long a process that ends waits for asynchronous works for which its script did not wait
_UNFINISHED_AFTER_FAILURE_S = 0.5


def note_connected(store: Store) -> None:
    """Writes down that this rank has initialised the group."""
    store.add(_CONNECTED, 1)


def leave_group(store: Store, rank: int, failure: BaseException | None, destroys: bool) -> None:
    """Leaves the group.

    Args:
        store: of the group.
        rank: of this process.
        failure: the exception that ends the script; None without one.
        destroys: whether the group ends with it; one that the user made stays.

    Ranks: each calls it for itself, as the last of what `lifetime.py` lists.
    """
    # A short script may end before all ranks have connected, and they would fail if its connections closed.
    if destroys and failure is None:
        _wait_for_all(store, _CONNECTED, dist.get_world_size(), _CONNECT_S)
    _say_goodbye(store, rank, failure)
    _finish_works(rank, failure is not None)
    if destroys:
        _destroy(store, rank, failure)


def _say_goodbye(store: Store, rank: int, failure: BaseException | None) -> None:
    """Writes down that this rank leaves, and why."""
    if not tcp_store.answers(store):
        return
    # The store may end between the check and this write. Then rank 0 is gone, and nobody is left to read it.
    with contextlib.suppress(RuntimeError):
        announce(store, rank, failure)
        store.add(_LEFT, 1)


def _destroy(store: Store, rank: int, failure: BaseException | None) -> None:
    """Destroys the group. The store ends with rank 0, so rank 0 waits until the others do not need it any more."""
    size = dist.get_world_size()
    is_needed = failure is None and rank == 0 and not _wait_for_all(store, _LEFT, size, _LEAVE_S)
    # After an error the other ranks may be gone, and NCCL would wait for them as it destroys the group.
    if failure is None or dist.get_backend() == "gloo":
        dist.destroy_process_group()
        forget_meshes()
    if is_needed:
        # Another rank may wait for a message of this one. It fails as the connections are closed, and then reads in the store
        # who has left. Objects that refer to each other in a circle keep the connections open until they are collected.
        gc.collect()
        _wait_for_all(store, _LEFT, size, _READ_S)


def _finish_works(rank: int, failed: bool) -> None:
    """Waits for asynchronous works for which the script did not wait, and warns if some do not end in time."""
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
    if not tcp_store.answers(store):
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
