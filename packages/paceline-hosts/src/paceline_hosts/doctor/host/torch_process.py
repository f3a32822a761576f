"""Collects the facts that need torch (versions, devices, all-reduces) in a separate process.

It imports torch while the agent that started it measures something else. If a driver crashes it or never answers, only
these facts are missing.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from itertools import permutations
from typing import TYPE_CHECKING, Any

from paceline.base.errors import cut
from paceline.base.version import VERSION
from paceline_hosts.doctor.facts import AllReduce, Devices, Versions
from paceline_hosts.doctor.host import nvidia
from paceline_hosts.remote.agent import StarterChannel

if TYPE_CHECKING:
    import torch

_TIMES = 5
_BACKENDS = ("gloo", "nccl", "xccl", "mpi")


def versions() -> Versions:
    """Returns the versions of the software on this host; it imports torch."""
    python = platform.python_version()
    try:
        import torch
        import torch.distributed
    except Exception as error:  # a broken installation can raise any error, which is a fact to report
        reason = cut(f"{type(error).__name__}: {error}", 500)
        return Versions(VERSION, python, sys.executable, torch_error=reason)
    nccl = ""
    if torch.distributed.is_available() and torch.distributed.is_nccl_available() and torch.version.cuda:
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    backends = []
    for name in _BACKENDS:
        if torch.distributed.is_available() and torch.distributed.is_backend_available(name):
            backends.append(name)
    return Versions(VERSION, python, sys.executable, str(torch.__version__), "", nccl, tuple(backends))


def devices() -> Devices:
    """Returns the accelerators of this host, as torch and the vendor's tool find them."""
    health, health_error = nvidia.device_health()
    try:
        import torch

        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return Devices(health=health, health_error=health_error)
        module = torch.get_device_module(accelerator)
        count = torch.accelerator.device_count()
        name_of = getattr(module, "get_device_name", lambda index: "unnamed")
        names = tuple(str(name_of(index)) for index in range(count))
        missing = _no_peer_access(module, count)
    except Exception as error:  # any error of a driver is a fact about the host
        reason = cut(f"{type(error).__name__}: {error}", 500)
        return Devices(error=reason, health=health, health_error=health_error)
    return Devices(accelerator.type, names, "", missing, health, health_error)


def _no_peer_access(module: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Returns the pairs of devices that cannot read each other's memory; none if the type of device does not tell."""
    can_access = getattr(module, "can_device_access_peer", None)
    if can_access is None:
        return ()
    pairs = permutations(range(count), 2)
    return tuple(pair for pair in pairs if not can_access(*pair))


def all_reduce(request: dict[str, Any]) -> tuple[str, list[AllReduce]]:
    """Sums a tensor of each size over all processes, and returns the backend and the times.

    Args:
        request: `store` (address and port of rank 0), `rank`, `world_size`, `device` (a number), `sizes` in bytes,
            `timeout_s`.

    Ranks: all processes, at the same time.
    """
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu")
    if accelerator is not None:
        device = torch.device(accelerator.type, request["device"])
        torch.accelerator.set_device_index(request["device"])
    backend = dist.get_default_backend_for_device(device)
    address, port = request["store"]
    url_host = f"[{address}]" if ":" in address else address  # a URL holds an IPv6 address in brackets
    dist.init_process_group(
        backend,
        init_method=f"tcp://{url_host}:{port}",
        rank=request["rank"],
        world_size=request["world_size"],
        timeout=timedelta(seconds=request["timeout_s"]),
    )
    try:
        times = [AllReduce(size, _time_all_reduce(size, device)) for size in request["sizes"]]
    finally:
        dist.destroy_process_group()
    return backend, times


def _time_all_reduce(num_bytes: int, device: torch.device) -> float:
    """Returns the median time of an all-reduce in seconds; the first one sets up connections and is not counted."""
    import torch
    import torch.distributed as dist

    tensor = torch.zeros(num_bytes // 4, device=device)
    seconds = []
    for _ in range(_TIMES + 1):
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        # A device works asynchronously: without this, only the start of the operation would be measured.
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def main() -> int:
    """Answers the requests of the agent until its input ends."""
    channel = StarterChannel()
    installed = versions()
    while True:
        request = channel.receive()
        if request["do"] == "facts":
            channel.answer(
                versions=asdict(installed), devices=asdict(Devices() if installed.torch_error else devices())
            )
        else:
            try:
                backend, times = all_reduce(request)
            except Exception as error:  # any error of the network or of a backend is a fact about the hosts
                channel.answer(error=cut(" ".join(f"{type(error).__name__}: {error}".split()), 500))
            else:
                channel.answer(error="", backend=backend, times=[asdict(row) for row in times])


if __name__ == "__main__":
    sys.exit(main())
