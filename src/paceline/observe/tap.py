"""`Tap`: sees every collective of this process, whoever issues it.

torch hands each collective to its backend through an operator (`c10d::allreduce_` and its siblings): those of DDP's C++
reducer, of FSDP2, of DTensor and of pipelines as well as those of a script. While somebody listens, the kernels of these
operators are replaced by ones that note the call and go on to the original. With the last listener they are put back.

issue       on the thread that issues it, before the backend gets it
completion  through the work's future; a work without one (gloo's point to point) is completed when somebody has waited
            for it
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
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


def listen(listener: Listener, devices: tuple[str, ...]) -> None:
    """Begins to tell `listener`; what is in flight already is not told.

    Args:
        devices: types of the devices that have tensors of this run.
    """
    _listeners.append(listener)
    if _library:
        return
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():  # torch tells of replaced kernels, which these are
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for key, device in _keys(devices):
            for name in _NAMES:
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
                    library.impl(name, _kernel(name, key, device), key, with_keyset=True, allow_override=True)
    _library.append(library)


def ignore(listener: Listener) -> None:
    """Ends telling `listener`; after the last one torch's own kernels are back."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and _library:
        _library.pop()._destroy()


def installed() -> bool:
    """Whether torch's kernels are replaced at the moment."""
    return bool(_library)


def _keys(devices: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for device in dict.fromkeys(("cpu", *devices)):
        yield torch._C._dispatch_key_for_device(device), device


def _kernel(name: str, key: str, device: str) -> Callable[..., Any]:
    """A kernel that tells, and calls the one that stands there now."""
    original = torch.library.get_kernel(f"c10d::{name}", key)
    arguments = [each.name for each in getattr(torch.ops.c10d, name).default._schema.arguments]
    group_at = arguments.index("process_group")
    sized_at = int(name.startswith(_SECOND))
    op = _NAMES[name]

    def kernel(keyset: Any, *args: Any) -> Any:
        size = 0 if op == "barrier" else _bytes(args[sized_at])
        ranks = dist.ProcessGroup.unbox(args[group_at]).size()
        done = [each.issued(op, size, ranks, device) for each in _listeners]
        out = original.call_boxed(keyset, *args)
        work = dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)
        if _has_future(type(work), op, str(key)):
            try:
                work.get_future().then(lambda _: _call(done))
                return out
            except RuntimeError as error:
                if "not implemented" not in str(error):
                    raise
                _WITHOUT_FUTURE.add((type(work), op, str(key)))
        awaited = _awaited()(work, done).boxed()
        return (*out[:-1], awaited) if isinstance(out, tuple) else awaited

    return kernel


_WITHOUT_FUTURE: set[tuple[type, str, str]] = set()
# Nobody in C++ keeps the Python half of a work, and without it waiting would never end; whoever waits has its own.
_UNDER_WAY: set[Any] = set()


def _has_future(kind: type, op: str, key: str) -> bool:
    return (kind, op, key) not in _WITHOUT_FUTURE


def _call(done: list[Callable[[], None]]) -> None:
    while done:
        done.pop()()


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


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
