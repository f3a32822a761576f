"""Waits for works of torch.distributed, several at a time, or all that are left at the end of a process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from paceline.torch_internals import gloo

if TYPE_CHECKING:
    from paceline.torch_internals.gloo import ProcessGroupGloo

_POLL_S = 0.001


class WorkHandle(Protocol):
    """A collective that is under way. Its tensors must not be changed or freed until `wait` has returned."""

    def wait(self) -> object:
        """Blocks until the output is complete (on an accelerator: until its stream may use it)."""
        ...


def wait_all(works: Iterable[WorkHandle | None]) -> None:
    """Waits for each work, also after one has failed: a buffer must not be freed while the backend still writes into it.

    Raises:
        RuntimeError: the error of the first work that failed.
    """
    failure: RuntimeError | None = None
    for work in works:
        assert work is not None, "begun by a rank outside of the group"
        try:
            work.wait()
        except RuntimeError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class PendingMessages:
    """Sends and receives that are under way. They are kept until `wait`, also if an error ended the operation before it.

    When gloo receives for a buffer that was freed, it never reads that connection again: every later message between the two
    ranks would hang. A `Work` keeps its tensor, so to keep the works is enough.
    """

    _kept: ClassVar[set[PendingMessages]] = set()

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def begin(self, works: Iterable[dist.Work | None]) -> None:
        """Takes works that were just started."""
        for work in works:
            assert work is not None, "begun by a rank outside of the group"
            self._works.append(work)
            self._kept.add(self)

    def wait(self) -> None:
        """Waits until all have arrived.

        Raises:
            RuntimeError: the error of the first work that failed.
        """
        try:
            wait_all(self._works)
        finally:
            self._works.clear()
            self._kept.discard(self)


def finish_threads(timeout_s: float) -> bool:
    """Waits until the threads of all gloo groups have finished the works that were started.

    A work that nobody waited for may still hold a tensor that Python created. A thread that releases it while the
    interpreter ends aborts the process, and a thread that releases the last reference to its own group tries to join
    itself. gloo has no call that joins its threads. But it hands works to them in order, and an all-reduce of an empty tensor
    needs no other rank: once each thread has done one, all earlier works are done.

    The groups cannot be used afterwards, because gloo counts these works too, and matches works between ranks by number.

    Returns:
        Whether all works were finished in time; a work that waits for other ranks may never be.
    """
    until = time.monotonic() + timeout_s
    pools = [_Threads(backend) for backend in gloo.backends()]
    # A list, so that each pool is finished, also after one was not in time.
    return all([pool.finish(until) for pool in pools])


class _Threads:
    """The threads of one gloo group."""

    def __init__(self, backend: ProcessGroupGloo) -> None:
        self._backend = backend
        self._count = gloo.num_threads(backend)
        self._seen: set[int] = set()
        self._main = threading.get_ident()
        self._nothing = torch.empty(0)  # referenced here until the end, so that no thread frees it
        self._callbacks: list[weakref.ref[Any]] = []

    def finish(self, until: float) -> bool:
        """Gives each thread a work. Returns whether all have done one before `until`."""
        while len(self._seen) < self._count and time.monotonic() < until:
            for _ in range(self._count - len(self._seen)):
                self._begin()
            time.sleep(_POLL_S)
        # A thread that still holds one of these callbacks needs the interpreter once more, to release it.
        while any(callback() is not None for callback in self._callbacks) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return len(self._seen) >= self._count

    def _begin(self) -> None:
        def note(_: object) -> None:
            # If the work was finished before this was attached, it runs in the main thread, and says nothing about the others.
            if threading.get_ident() != self._main:
                self._seen.add(threading.get_ident())
                time.sleep(_POLL_S)  # so that another thread takes the next one

        self._callbacks.append(weakref.ref(note))
        gloo.begin_nothing(self._backend, self._nothing).then(note)
