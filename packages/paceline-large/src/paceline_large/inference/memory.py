"""What this machine has: memory of each device, and how fast bytes move. The only measurements of the package."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from paceline.base.errors import PlanError, Problem
from paceline_large.inference.workload import Rates

# The rest is for what nobody plans: fragments, libraries, the script's own objects.
_USABLE = 0.9
# Bytes of one measurement: more than the caches of most processors hold.
_SAMPLE = 64 << 20


def free_memory() -> dict[str, int]:
    """Returns the bytes that are free now on each accelerator, and last those on the host ("cpu")."""
    memory = {}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator(check_available=True)
        for index in range(torch.accelerator.device_count()):
            memory[f"{kind}:{index}"] = torch.accelerator.get_memory_info(index)[0]
    memory["cpu"] = _free_on_host(Path("/sys/fs/cgroup"))
    return memory


def available_memory() -> dict[str, int]:
    """Returns nine tenths of the free bytes of each accelerator, and of the host ("cpu")."""
    return {device: int(_USABLE * nbytes) for device, nbytes in free_memory().items()}


def _free_on_host(group: Path) -> int:
    """Returns the bytes of the host's memory that are free, or can be freed at once. `group` is the container's cgroup."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Linux counts what it can give back from the page cache as available. Other systems have no such file, so that all
    # memory counts there.
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        rows = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        free = int(rows["MemAvailable"].split()[0]) * 1024
    # A container may have less than its machine. "max" stands for no limit.
    limit = "max"
    if (group / "memory.max").exists():
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
    if limit != "max":
        used = int((group / "memory.current").read_text(encoding="ascii"))
        # That includes files in the page cache, such as a checkpoint that was just written. Linux frees the inactive ones for
        # whoever needs memory, so that Docker and Kubernetes do not count them either.
        rows = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        used -= int(rows["inactive_file"])
        free = min(free, max(int(limit) - used, 0))
    return free


def parse_memory(memory: Mapping[str | int, int | str]) -> dict[str, int]:
    """Bytes of each device, by its full name.

    Args:
        memory: names such as "cuda:0", "cpu", "disk", or numbers of accelerators -> bytes, or texts such as "20GiB".

    Raises:
        PlanError: `placement-device`.
        CheckpointError: `checkpoint-size`.
    """
    # Imported here because it takes half a second, and whoever asks for free bytes alone does not need it.
    from paceline.checkpoint.weights.export import parse_size

    sizes = {}
    problems = []
    for name, size in memory.items():
        device, problem = parse_device(name)
        problems += problem
        # 0 forbids a device, which is no size of a file.
        sizes[device] = 0 if size == 0 else parse_size(size)
    if problems:
        raise PlanError.of(problems)
    return sizes


def parse_device(name: str | int | torch.device) -> tuple[str, list[Problem]]:
    """Returns the full name of a device, such as "cuda:0"; and what is wrong with it."""
    if name == "disk":
        return "disk", []
    try:
        if isinstance(name, int):
            # A placement may be planned on a machine without accelerators. Then a number means a CUDA device.
            kind = "cuda"
            if torch.accelerator.is_available():
                kind = str(torch.accelerator.current_accelerator(check_available=True))
            device = torch.device(f"{kind}:{name}")
        else:
            device = torch.device(name)
    except RuntimeError as error:
        problem = Problem(
            "placement-device",
            f"{name!r} is no device.",
            why=str(error).partition("\n")[0],
            fix='write "cuda:0", the number of an accelerator, "cpu" or "disk"; a whole placement may be "auto"',
        )
        return str(name), [problem]
    if device.type == "cpu":
        return "cpu", []
    return f"{device.type}:{device.index or 0}", []


def missing_devices(devices: tuple[str, ...]) -> list[Problem]:
    """Problems for those accelerators that this machine does not have."""
    there = [name for name in free_memory() if name != "cpu"]
    problems = []
    for device in devices:
        if device not in ("cpu", "disk", "meta", *there):
            problem = Problem(
                "placement-device",
                f"there is no device {device} here.",
                why=f"torch finds {', '.join(there) or 'no accelerator'}",
                fix="place the model on devices that are there; a placement for others can be printed, but not run",
            )
            problems.append(problem)
    return problems


def measure_rates(device: str, path: str | os.PathLike[str]) -> Rates:
    """Measures how fast this machine moves bytes, in about a tenth of a second.

    The rate of the disk is that of one large read of a file of the checkpoint; if the page cache holds it, it is the page
    cache's.

    Args:
        device: where the model computes.
        path: a file of at least some megabytes on the disk in question.
    """
    values = torch.ones(_SAMPLE // 4, device=device)
    # An accelerator computes while the host goes on. `item` waits for it, so that the time of the work itself is measured.
    memory = _rate(lambda: values.sum().item(), _SAMPLE)
    copy = memory
    if torch.device(device).type != "cpu":
        host = torch.ones(_SAMPLE // 4, device="cpu", pin_memory=True)
        copy = _rate(lambda: (values.copy_(host), values[:1].item()), _SAMPLE)
    # Without Python's buffer, which would read in small pieces.
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(min(_SAMPLE, os.path.getsize(path)))
        start = time.perf_counter()
        file.readinto(buffer)
        disk = len(buffer) / (time.perf_counter() - start)
    return Rates(memory, copy, disk, "measured")


def _rate(work: Callable[[], object], nbytes: int) -> float:
    """Bytes a second of the fastest of three runs, after one to warm up."""
    work()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return nbytes / min(seconds)
