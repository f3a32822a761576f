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

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from paceline_lens.torch_internals.station import Station, awaited_work

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


class CollectiveListener(Protocol):
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


_listeners: list[CollectiveListener] = []
_stations: list[Station] = []


def listen(listener: CollectiveListener) -> None:
    """Begins to tell `listener`; what is in flight already is not told."""
    _listeners.append(listener)
    if not _stations:
        station = Station("c10d")
        for name in _NAMES:
            station.observe(name, _observer(name, station.argument_names(name)))
        _stations.append(station)


def ignore(listener: CollectiveListener) -> None:
    """Ends telling `listener`; after the last one the operators are as they were."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners and _stations:
        _stations.pop().close()


def installed() -> bool:
    """Returns whether calls are passed through here at the moment."""
    return bool(_stations)


def _observer(name: str, arguments: Sequence[str]) -> Callable[[Callable[[], Any], tuple[Any, ...]], Any]:
    """Tells the calls of one operator, and passes them on."""
    group_at = arguments.index("process_group")
    sized_at = int(name.startswith(_SECOND))
    op = _NAMES[name]

    def observe(pass_on: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        size, device = _sized(args[sized_at])
        if op == "barrier":
            size = 0
        ranks = dist.ProcessGroup.unbox(args[group_at]).size()
        completed = [listener.issued(op, size, ranks, device) for listener in _listeners]
        out = pass_on()
        boxed = out[-1] if isinstance(out, tuple) else out
        work = dist.Work.unbox(boxed)
        if (type(work), op, device) not in _WITHOUT_FUTURE:
            try:
                work.get_future().then(lambda _: _call(completed))
                return out
            except RuntimeError as error:
                if "not implemented" not in str(error):
                    raise
                _WITHOUT_FUTURE.add((type(work), op, device))
        awaited = awaited_work(work, lambda: _call(completed))
        return (*out[:-1], awaited) if isinstance(out, tuple) else awaited

    return observe


_WITHOUT_FUTURE: set[tuple[type, str, str]] = set()


def _call(completed: list[Callable[[], None]]) -> None:
    while completed:
        completed.pop()()


def _sized(tensors: Tensor | Sequence[Any]) -> tuple[int, str]:
    """Bytes of tensors in lists, and the type of their device."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size(), tensors.device.type
    sizes = [_sized(part) for part in tensors]
    device = sizes[0][1] if sizes else "cpu"
    return sum(count for count, _ in sizes), device
