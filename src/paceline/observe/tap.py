"""`Tap`: sees every collective of this process, whoever issues it.

torch hands each collective to its backend through an operator (`c10d::allreduce_` and its siblings): those of DDP's C++
reducer, of FSDP2, of DTensor and of pipelines as well as those of a script. On the way to the kernel of its device each
call passes a station of torch's dispatcher that these operators do not use. While somebody listens, a function there notes
the call and passes it on. With the last listener it is taken away.

issue       on the thread that issues it, before the backend gets it
completion  through the work's future; a work without one (gloo's point to point) is completed when somebody has waited
            for it
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
_STATION = "BackendSelect"  # part of every call, whatever its tensors and its thread
# Operators whose second argument, not the first, is what this rank brings.
_SECOND = ("allgather", "_allgather", "gather_", "alltoall")


class Listener(Protocol):
    """Whoever is told of collectives."""

    def issued(self, op: str, size_bytes: int, ranks: int, device: str) -> Callable[[], None]:
        """Notes a call; what it returns is called once on completion, on any thread.

        Args:
            op: its name in `torch.distributed`.
            size_bytes: what this rank brings; of a scatter and a reduce-scatter what it gets.
            ranks: how many take part.
            device: type of the device that the backend works on.
        """
        ...


_listeners: list[Listener] = []
_library: list[torch.library.Library] = []


def listen(listener: Listener) -> None:
    """Begins to tell `listener`; what is in flight already is not told."""
    _listeners.append(listener)
    if not _library:
        library = torch.library.Library("c10d", "IMPL")
        for name in _NAMES:
            library.impl(name, _kernel(name), _STATION, with_keyset=True)
        _library.append(library)


def ignore(listener: Listener) -> None:
    """Ends telling `listener`; after the last one the operators are as they were."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and _library:
        _library.pop()._destroy()


def installed() -> bool:
    """Whether calls are passed through here at the moment."""
    return bool(_library)


def _kernel(name: str) -> Callable[..., Any]:
    """Tells, and passes the call on."""
    operator = getattr(torch.ops.c10d, name).default
    group_at = [each.name for each in operator._schema.arguments].index("process_group")
    sized_at = int(name.startswith(_SECOND))
    op = _NAMES[name]
    beyond = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _STATION))

    def kernel(keyset: Any, *args: Any) -> Any:
        size, device = _sized(args[sized_at])
        ranks = dist.ProcessGroup.unbox(args[group_at]).size()
        done = [each.issued(op, 0 if op == "barrier" else size, ranks, device) for each in _listeners]
        # Without the interpreter's lock, which a thread of the backend may wait for while it holds the backend's own.
        out = operator.redispatch(keyset & beyond, *args)
        work = dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)
        if (type(work), op, device) not in _WITHOUT_FUTURE:
            try:
                work.get_future().then(lambda _: _call(done))
                return out
            except RuntimeError as error:
                if "not implemented" not in str(error):
                    raise
                _WITHOUT_FUTURE.add((type(work), op, device))
        awaited = _awaited()(work, done).boxed()
        return (*out[:-1], awaited) if isinstance(out, tuple) else awaited

    return kernel


_WITHOUT_FUTURE: set[tuple[type, str, str]] = set()
# Nobody in C++ keeps the Python half of a work, and without it waiting would never end; whoever waits has its own.
_UNDER_WAY: set[Any] = set()


def _call(done: list[Callable[[], None]]) -> None:
    while done:
        done.pop()()


def _sized(tensors: Any) -> tuple[int, str]:
    """Bytes of tensors in lists, and the type of their device."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size(), tensors.device.type
    sizes = [_sized(each) for each in tensors]
    return sum(count for count, _ in sizes), sizes[0][1] if sizes else "cpu"


@cache
def _awaited() -> type:
    """A work without a future, which tells when somebody has waited for it."""

    class Awaited(dist.Work):
        def __init__(self, work: Any, done: list[Callable[[], None]]) -> None:
            super().__init__()
            self._work, self._done = work, done
            _UNDER_WAY.add(self)

        def wait(self, timeout: Any = None) -> bool:
            finished = self._work.wait() if timeout is None else self._work.wait(timeout)
            _call(self._done)
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
