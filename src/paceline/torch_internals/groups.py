"""The private side of process groups: their timeouts, and the store behind all of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long a collective may take; None where the backend has no limit, as torch's "fake" one."""
    options = group._get_backend(device).options
    return None if options is None else options._timeout


def default_store() -> Any:
    """The store behind the default process group, which must stand."""
    return dist.distributed_c10d._get_default_store()
