"""The private side of process groups: their timeouts, and the store behind all of them."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store  # public as `torch.distributed.Store`, but for type checkers


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long a collective may take; None where the backend has no limit, as torch's "fake" one."""
    options = group._get_backend(device).options
    return None if options is None else options._timeout


def set_timeout(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Limits the time of collectives for tensors of a device. `new_group` has an argument for it, `DeviceMesh` has none."""
    backend = group._get_backend(device)
    # A vendor's own backend may have no way to change it.
    if hasattr(backend, "_set_default_timeout"):
        backend._set_default_timeout(timeout)


def was_initialized() -> bool:
    """Whether this process has ever had a process group, also where it has destroyed it since."""
    return getattr(dist.distributed_c10d, "_backend", None) is not None


def default_store() -> Store:
    """The store behind the default process group, which must stand."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store
