"""gloo's process groups: their backends, and the threads that do their works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupGloo as ProcessGroupGloo  # not public for type checkers


def backends() -> list[ProcessGroupGloo]:
    """The gloo backend of each process group that stands, in no order."""
    backends: list[ProcessGroupGloo] = []
    for group in dist.distributed_c10d._world.pg_map:
        for device in group._device_types:
            backend = group._get_backend(device)
            # In torch's DETAIL mode a wrapper stands in front, which hands nothing on without the other ranks.
            if isinstance(backend, dist.ProcessGroupGloo) and backend not in backends:
                backends.append(backend)
    return backends


def num_threads(backend: ProcessGroupGloo) -> int:
    """How many threads do the works of a backend."""
    return int(backend.options._threads)


def begin_nothing(backend: ProcessGroupGloo, empty: torch.Tensor) -> torch.futures.Future[Any]:
    """Begins an all-reduce of an empty tensor: one of the threads takes it in its turn, and no other rank is needed.

    Ranks: each for itself; but the backend counts it, so that no collective of several ranks may follow.
    """
    future: torch.futures.Future[Any] = backend.allreduce([empty]).get_future()
    return future
