"""Works of torch.distributed: waited for together, and none left behind at the end of a process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.torch_internals import gloo

if TYPE_CHECKING:
    from paceline.torch_internals.gloo import ProcessGroupGloo

_POLL_S = 0.001


class Handle(Protocol):
    """A collective under way; its tensors must be left alone until `wait` has returned."""

    def wait(self) -> object:
        """Blocks until the output is complete (on an accelerator: until its stream may use it)."""
        ...


def wait_all(works: Iterable[Handle | None]) -> None:
    """Waits for each work, also after one has failed: a buffer must not go while the backend still writes into it.

    Raises:
        RuntimeError: the error of the first that failed.
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


def finish_threads(timeout_s: float) -> bool:
    """Waits until the threads of all gloo groups are through with the works that were begun.

    A work that nobody waited for may still hold a tensor that Python made. A thread that lets go of it while the
    interpreter ends aborts the process, and one that lets go of the last reference to its own group tries to join
    itself. gloo has no call that joins its threads; but it hands works to them in order, and an all-reduce of nothing
    is a work that needs no other rank: once each thread has done such a one, all that came before is done.

    The groups are of no use afterwards: gloo counts these works too, and matches those of several ranks by number.

    Returns:
        Whether all were through in time; a work that waits for other ranks may never be.
    """
    until = time.monotonic() + timeout_s
    pools = [_Threads(backend) for backend in gloo.backends()]
    return all([pool.finish(until) for pool in pools])


class _Threads:
    """The threads of one gloo group."""

    def __init__(self, backend: ProcessGroupGloo) -> None:
        self._backend = backend
        self._count = gloo.num_threads(backend)
        self._seen: set[int] = set()
        self._main = threading.get_ident()
        self._nothing = torch.empty(0)  # ours to the end, so that no thread frees it
        self._callbacks: list[weakref.ref[Any]] = []

    def finish(self, until: float) -> bool:
        """Whether each thread did a work of ours before `until`."""
        while len(self._seen) < self._count and time.monotonic() < until:
            for _ in range(self._count - len(self._seen)):
                self._begin()
            time.sleep(_POLL_S)
        # A thread that still holds one of our callbacks needs the interpreter once more, to let go of it.
        while any(callback() is not None for callback in self._callbacks) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return len(self._seen) >= self._count

    def _begin(self) -> None:
        def note(_: object) -> None:
            # Where the work was through before this was attached, it runs in the main thread, and says nothing.
            if threading.get_ident() != self._main:
                self._seen.add(threading.get_ident())
                time.sleep(_POLL_S)  # so that another thread takes the next one

        self._callbacks.append(weakref.ref(note))
        gloo.begin_nothing(self._backend, self._nothing).then(note)
