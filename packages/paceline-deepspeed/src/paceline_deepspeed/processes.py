"""`init_distributed`: the process group, whatever backend a script names."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.base.log import warn_once
from paceline.config import resolve_run
from paceline.world import device as devices
from paceline.world import rendezvous, runtime
from paceline.world.world import World

_dist: Any = dist  # torch's stubs lack its stores
_ADDRESS = re.compile(r"tcp://(?P<host>[^/]+):(?P<port>\d+)/?$")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Forms the process group of all ranks; one that stands already is used as it is.

    A script that no launcher started is one process, and gets a group of one.

    Args:
        dist_backend: of torch.distributed; one that this device does not have becomes the device's own, with a warning.
        timeout: a timedelta or seconds, until a collective counts as stuck.
        init_method: `tcp://host:port` where no launcher said where to meet.
        dist_init_required: False does nothing.
        rank, world_size: who this process is, where no launcher said so.
        auto_mpi_discovery, distributed_port, verbose, config: taken and not needed: the launcher's environment is read.

    Ranks: all.

    Raises:
        WorldError: those of `paceline.world.rendezvous.join`.
    """
    if dist_init_required is False or (dist.is_available() and dist.is_initialized()):
        return
    world = World.detect()
    if world.source == "single" and world_size > 0 and rank >= 0:
        # No launcher has started this process, and the script itself says who it is.
        source = "init_distributed(rank=..., world_size=...)"
        world = replace(world, rank=rank, size=world_size, local_rank=rank, local_size=world_size, source=source)
        address = _ADDRESS.match(init_method or "")
        if address:
            world = replace(world, address=address["host"], port=int(address["port"]))
    settings = resolve_run().settings
    timeout_s = settings.timeout_s
    if isinstance(timeout, timedelta):
        timeout_s = timeout.total_seconds()
    elif timeout is not None:
        timeout_s = float(timeout)
    # A process that is alone meets nobody: a store in its own memory needs no port.
    store = None
    if world.size == 1:
        store = _dist.HashStore()
    detect = runtime.current().device
    backend = _backend(dist_backend, detect(world, cpu=settings.cpu))
    rendezvous.join(world, cpu=settings.cpu, backend=backend, timeout_s=timeout_s, store=store, detect=detect)


def _backend(wanted: str | None, device: torch.device) -> str | None:
    """Returns the backend that was asked for, where it reaches this device; else None, which means the device's own."""
    if wanted is None:
        return None
    device_types = dist.Backend.backend_capability.get(wanted.lower(), [])
    if device.type in device_types and dist.is_backend_available(wanted.lower()):
        return wanted.lower()
    default = devices.default_backend(device)
    warn_once(
        "compat",
        f"the backend {wanted!r} cannot reach this machine's device ({device.type}); its own, {default!r}, is used. Leave "
        "`dist_backend` out to silence this.",
    )
    return None
