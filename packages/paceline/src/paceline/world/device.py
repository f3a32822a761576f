"""Finds the device on which this process computes. It asks only `torch.accelerator`, which is the same for every vendor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paceline.base.devices import device_type
from paceline.base.errors import WorldError
from paceline.world.world import World


def detect(world: World, *, cpu: bool = False, index: int | None = None) -> torch.device:
    """Returns the device of this process, and starts nothing on it.

    Args:
        world: says which process of its host this is.
        cpu: take the CPU even where there is an accelerator.
        index: number of the accelerator; by default the local rank. A process that sees a single accelerator
            takes that one, since a batch system may show each process its own.

    Raises:
        WorldError: `device-missing`, where the host has fewer accelerators than processes.
    """
    accelerator = None if cpu else torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    wanted = index
    if wanted is None:
        wanted = world.local_rank if count > 1 else 0
    if not 0 <= wanted < count:
        raise WorldError(
            "device-missing",
            f"process {world.rank} needs {accelerator.type}:{wanted}, but this host shows {count} of them.",
            why=f"{world.local_size} processes run on this host ({world.source})",
            fix=f"start {count} processes a host, make more devices visible, or run on the CPU with cpu=True",
        )
    if not device_type(accelerator.type).is_numbered:
        return torch.device(accelerator.type)
    return torch.device(accelerator.type, wanted)


def select(device: torch.device) -> None:
    """Makes `device` the current one of this process."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def default_backend(device: torch.device, wanted: str | None = None) -> str:
    """Returns the backend string of a process group on `device`: gloo for CPU tensors, and the device's own for the others.

    Raises:
        WorldError: `backend-missing`, where this build of torch lacks one of them.
    """
    if wanted and ":" in wanted:
        pairs = dict(pair.split(":", 1) for pair in wanted.split(","))
    else:
        pairs = {"cpu": wanted if wanted and device.type == "cpu" else "gloo"}
        if device.type != "cpu":
            of_torch = dist.Backend.default_device_backend_map.get(device.type)
            pairs[device.type] = wanted or of_torch or device_type(device.type).backend
    asked_for = f", and backend={wanted!r} was asked for" if wanted else ""
    for backend in pairs.values():
        if not dist.is_available() or not dist.is_backend_available(backend):
            raise WorldError(
                "backend-missing",
                f"this build of torch has no communication backend {backend!r}.",
                why=f"the device is {device}{asked_for}",
                fix="install a build of torch that has it, or leave `backend` unset",
            )
    if set(pairs.values()) == {"gloo"}:
        return "gloo"  # torch warns about "cpu:gloo", which means the same
    return ",".join(f"{kind}:{backend}" for kind, backend in pairs.items())


def identity(device: torch.device) -> str:
    """Returns what identifies this device among all devices of its host; "" if that cannot be known."""
    return str(getattr(device_properties(device), "uuid", ""))


def device_properties(device: torch.device) -> Any:
    """Returns what torch's module of an accelerator says of it: its name, total_memory, uuid, ...; None if it says nothing."""
    if device.type == "cpu":
        return None
    read = getattr(torch.get_device_module(device), "get_device_properties", None)
    return read(device) if callable(read) else None
