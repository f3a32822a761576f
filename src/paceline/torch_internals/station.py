"""The private side of torch's operators: a station that every call of them passes, and works without a future.

On the way to the kernel of its device each call passes a station of torch's dispatcher (`BackendSelect`) that collectives
do not use; it is part of every call, whatever its tensors and its thread.
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
    """Functions that stand before the kernels of some operators.

    Args:
        namespace: of the operators, such as "c10d".
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library = torch.library.Library(namespace, "IMPL")
        self._observers: dict[str, Observer] = {}

    def argument_names(self, name: str) -> list[str]:
        """Names of an operator's arguments, in order."""
        return [argument.name for argument in self._operator(name)._schema.arguments]

    def observe(self, name: str, observer: Observer) -> None:
        """Calls `observer(pass_on, args)` in the place of an operator; what it returns is what the caller gets.

        `pass_on()` lets the call go on, without the interpreter's lock: a thread of the backend may wait for that lock while
        it holds the backend's own.
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
            # Another thread was on its way here when the station was closed.
            if observer is None:
                return operator.redispatch(keyset & beyond, *args)
            return observer(lambda: operator.redispatch(keyset & beyond, *args), args)

        self._library.impl(name, kernel, _STATION, with_keyset=True)

    def close(self) -> None:
        """Takes the functions away."""
        self._library._destroy()
        self._observers.clear()

    def _operator(self, name: str) -> Any:
        return getattr(getattr(torch.ops, self._namespace), name).default


# Nobody in C++ keeps the Python half of a work, and without it waiting would never end; whoever waits has its own.
_UNDER_WAY: set[dist.Work] = set()


def awaited_work(work: dist.Work, completed: Callable[[], None]) -> Any:
    """A work, as operators return it, that calls `completed` once somebody has waited for it."""
    return _awaited_class()(work, completed).boxed()


@cache
def _awaited_class() -> Callable[[dist.Work, Callable[[], None]], Any]:
    """Made when it is first needed: a torch without `distributed` has no `Work`."""

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
