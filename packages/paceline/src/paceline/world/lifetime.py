"""What ends as this process leaves its group, in one order.

    run       saves in the background, locks, an evaluation that nobody gathered: they may still talk to the other ranks
    group     threads that watch the group, connections between its ranks, words for the other ranks in the store
    then      `rendezvous.leave` ends the group itself

Each is told once, and what was registered first ends first. All of it belongs to the process that registered it: a forked child
inherits this table, but not the threads and connections that would be ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import torch.distributed as dist


class Companion(Protocol):
    """An object that lives as long as this process is in its group, such as a thread that watches the group."""

    def close(self, why: str) -> None:
        """Called when this process leaves the group, with the reason."""
        ...


C = TypeVar("C", bound=Companion)
_Ends = dict[object, Callable[[str], object]]


class _Table:
    """What one process has registered."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.run_ends: _Ends = {}
        self.group_ends: _Ends = {}
        self.companions: dict[type[Companion], Companion] = {}


_table = _Table()


def _own() -> _Table:
    """Returns the table of this process; a forked child gets an empty one."""
    global _table
    if _table.pid != os.getpid():
        _table = _Table()
    return _table


def at_end_of_run(call: Callable[[str], object]) -> Callable[[], None]:
    """Has `call` called with the reason for which this process leaves, while its group is there; also if there is none.

    Returns:
        A function that takes this back.
    """
    return _add(_own().run_ends, call)


def at_end_of_group(call: Callable[[str], object]) -> Callable[[], None]:
    """Has `call` called with the reason for which this process leaves, after the run has ended.

    Returns:
        A function that takes this back.
    """
    return _add(_own().group_ends, call)


def _add(ends: _Ends, call: Callable[[str], object]) -> Callable[[], None]:
    key = object()
    ends[key] = call

    def forget() -> None:
        ends.pop(key, None)

    return forget


def keep(companion: Companion) -> None:
    """Keeps an object until this process leaves its group, and closes it then. It replaces an earlier one of its class."""
    _own().companions[type(companion)] = companion
    at_end_of_group(companion.close)


def kept(kind: type[C]) -> C | None:
    """Returns the object of this class that `keep` has got; None if there is none, as in a forked child."""
    return cast("C | None", _own().companions.get(kind))


def end(why: str) -> None:
    """Ends all of it. What is registered meanwhile ends too."""
    table = _own()
    while table.run_ends:
        table.run_ends.pop(next(iter(table.run_ends)))(why)
    # Companions may keep groups, whose connections would stay open. So no reference to one stays here.
    table.companions.clear()
    while table.group_ends:
        # It may write into the store. If rank 0 is gone, so is the store, and nobody is left to read the reason.
        with contextlib.suppress(dist.DistNetworkError):
            table.group_ends.pop(next(iter(table.group_ends)))(why)
