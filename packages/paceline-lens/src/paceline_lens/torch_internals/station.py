"""The private side of torch's operators: a dispatch key that every call passes, and `Work` objects without a future.

On the way to the kernel of its device, each call passes the key `BackendSelect` of torch's dispatcher, which collectives do
not use themselves. It is part of every call, whatever the tensors and the thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_STATION = "BackendSelect"

Observer = Callable[[Callable[[], Any], tuple[Any, ...]], Any]


class Station:
    """Functions that are called before the kernels of some operators.

    Args:
        namespace: the namespace of the operators, such as "c10d".
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library = torch.library.Library(namespace, "IMPL")
        self._observers: dict[str, Observer] = {}

    def argument_names(self, name: str) -> list[str]:
        """Returns the names of an operator's arguments, in order."""
        return [argument.name for argument in self._operator(name)._schema.arguments]

    def observe(self, name: str, observer: Observer) -> None:
        """Calls `observer(pass_on, args)` in place of an operator; the caller gets what it returns.

        `pass_on()` calls the kernel, and releases the interpreter's lock for that: a thread of the backend may wait for this
        lock while it holds a lock of the backend.
        """
        operator = self._operator(name)
        beyond = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _STATION))

        # torch keeps the kernel after the library is destroyed, until the next one takes its place. So the kernel must not
        # hold the observer, which may hold process groups: a forked process that replaces the kernel would free them, and
        # their destructors wait for threads that a fork does not copy.
        self._observers[name] = observer
        observers = self._observers

        def kernel(keyset: Any, *args: Any) -> Any:
            observer = observers.get(name)
            # Another thread may have been in this call already when the station was closed.
            if observer is None:
                return operator.redispatch(keyset & beyond, *args)
            return observer(lambda: operator.redispatch(keyset & beyond, *args), args)

        self._library.impl(name, kernel, _STATION, with_keyset=True)

    def close(self) -> None:
        """Removes the functions."""
        self._library._destroy()
        self._observers.clear()

    def _operator(self, name: str) -> Any:
        return getattr(getattr(torch.ops, self._namespace), name).default


# C++ does not keep the Python part of a `Work` alive, and without that part a wait would never end. So it is kept here until
# somebody has waited for it.
_UNDER_WAY: set[dist.Work] = set()


def awaited_work(work: dist.Work, completed: Callable[[], None]) -> Any:
    """Returns a `Work`, in the form in which operators return it, that calls `completed` after a caller has waited for it."""
    return _awaited_class()(work, completed).boxed()


@cache
def _awaited_class() -> Callable[[dist.Work, Callable[[], None]], Any]:
    """Returns the class, which is made when it is first needed: a torch without `distributed` has no `Work`."""

    class Awaited(dist.Work):
        def __init__(self, work: dist.Work, completed: Callable[[], None]) -> None:
            super().__init__()
            self._work = work
            self._completed = completed
            _UNDER_WAY.add(self)

        def wait(self, timeout: Any = None) -> bool:
            finished = self._work.wait() if timeout is None else self._work.wait(timeout)
            self._completed()
            _UNDER_WAY.discard(self)
            return bool(finished)

        def is_completed(self) -> bool:
            return bool(self._work.is_completed())

        def is_success(self) -> bool:
            return bool(self._work.is_success())

        def exception(self) -> Any:
            return self._work.exception()

        def source_rank(self) -> int:
            return int(self._work.source_rank())

        def _source_rank(self) -> int:
            return int(self._work._source_rank())

        def result(self) -> Any:
            return self._work.result()

        def synchronize(self) -> None:
            self._work.synchronize()

    return Awaited
