"""The private side of process groups: their timeouts, and the store behind all of them."""

from __future__ import annotations

import os
import socket
import struct
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store  # public as `torch.distributed.Store`, but for type checkers

# How a client of torch's TCPStore begins (TCPStoreBackend.hpp): the query VALIDATE (0) with the magic number, then the query
# PING (13) with a number, which the store sends back. Numbers are in the byte order of the host.
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
_PING = 13
_NUMBER = struct.Struct("=I")


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


def collectives_so_far() -> int:
    """How many collectives this process has entered in the group of all; 0 where its backend does not count them."""
    try:
        return dist.group.WORLD._get_sequence_number_for_group() if dist.group.WORLD is not None else 0
    except (RuntimeError, NotImplementedError):  # torch raises it for backends without this number
        return 0


def was_initialized() -> bool:
    """Whether this process has ever had a process group, also where it has destroyed it since."""
    return getattr(dist.distributed_c10d, "_backend", None) is not None


def default_store() -> Store:
    """The store behind the default process group, which must stand."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def is_tcp_store(connection: socket.socket) -> bool:
    """Whether a TCPStore is at the other end of a new connection.

    torch's own client waits without a limit if another server never answers, and prints C++ frames if it answers.

    Raises:
        OSError: the connection was lost, or there was no answer within the timeout of the socket.
    """
    number = _NUMBER.pack(os.getpid())
    connection.sendall(_VALIDATE + bytes([_PING]) + number)
    return connection.recv(_NUMBER.size, socket.MSG_WAITALL) == number
