"""Facts about a host's cores, memory, limits and programs, read from the system without torch."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from paceline.base import env as environment
from paceline.launch import host
from paceline_hosts.doctor.facts import Limit, Processors

# Programs that a fix may name. A fix names only a program that is installed on the host.
_PROGRAMS = ("chronyc", "timedatectl", "firewall-cmd", "ufw", "iptables", "nft", "nvidia-smi", "ethtool")
_UNLIMITED_BYTES = 1 << 52  # cgroup v1 has no word for "no limit", and writes a number near 2**63


def processors() -> Processors:
    """Returns the cores, the memory and the threads that this process can use."""
    return Processors(
        host.cores(),
        os.cpu_count() or 1,
        quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")),
        memory_limit(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")),
        _memory(),
        environment.snapshot().get("OMP_NUM_THREADS", ""),
        numa_nodes(Path("/sys/devices/system/node"), host.core_numbers()),
    )


def quota(root: Path, own: Path) -> float | None:
    """Returns the CPU time that the control group allows, in cores; None for no limit.

    The limits of all groups above it apply as well, so the smallest one is returned.

    Args:
        root: folder where control groups are mounted.
        own: the file that names the groups of this process.
    """
    amounts = []
    for folder in _groups(root, own, "cpu"):
        text = _text(folder / "cpu.max")  # version 2: "200000 100000", or "max 100000"
        if not text:  # version 1
            text = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        words = text.split()
        if len(words) == 2 and words[0].isdigit() and int(words[1]) > 0:
            amounts.append(int(words[0]) / int(words[1]))
    return min(amounts, default=None)


def memory_limit(root: Path, own: Path) -> int | None:
    """Returns the bytes of memory that the control group and all groups above it allow; None for no limit."""
    amounts = []
    for folder in _groups(root, own, "memory"):
        text = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            amounts.append(int(text))
    return min(amounts, default=None)


def _groups(root: Path, own: Path, controller: str) -> list[Path]:
    """Returns the folders of this process's control group and of those above it, in version 2 or 1."""
    folders = []
    for line in _text(own).splitlines():
        # "4:cpu,cpuacct:/docker/ab" in version 1, which has a mount for each controller; "0::/docker/ab" in version 2.
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controller if controllers else root
        group = mount / path.lstrip("/")
        folders += [mount, group, *(above for above in group.parents if mount in above.parents)]
    return folders


def numa_nodes(root: Path, cores: tuple[int, ...]) -> tuple[int, ...]:
    """Returns for each NUMA node how many of its cores a process may use.

    Args:
        root: the system's folder of nodes.
        cores: the cores that a process may use; () if the system does not say, which counts as all.
    """
    counts = []
    # The order is by number, where the order by name would put node10 before node2.
    for node in sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        node_cores = core_list(_text(node / "cpulist"))
        usable_cores = node_cores & set(cores) if cores else node_cores
        counts.append(len(usable_cores))
    return tuple(counts)


def core_list(text: str) -> set[int]:
    """Returns the numbers in a list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def limits() -> dict[str, Limit]:
    """Returns field of `HostFacts` -> the limit of this process; limits that the system does not have are left out."""
    import resource

    names = {
        "open_files": "RLIMIT_NOFILE",
        "locked_memory": "RLIMIT_MEMLOCK",
        "processes": "RLIMIT_NPROC",
        "core_files": "RLIMIT_CORE",
    }
    limits_by_field = {}
    for field, constant in names.items():
        number = getattr(resource, constant, None)
        if number is not None:
            soft, hard = resource.getrlimit(number)
            limits_by_field[field] = Limit(_limit(soft), _limit(hard))
    return limits_by_field


def _limit(value: int) -> int:
    return value if 0 <= value < _UNLIMITED_BYTES else -1


def shared_memory(path: str = "/dev/shm") -> tuple[int, int] | None:
    """Returns the size of the shared memory and its free space, in bytes; None if there is none at `path`."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def programs() -> tuple[str, ...]:
    """Returns the installed programs, among those that a fix may name."""
    # A user's PATH may lack the folders with programs for administrators.
    path = os.pathsep.join([environment.snapshot().get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return tuple(name for name in _PROGRAMS if shutil.which(name, path=path))


def in_container() -> bool:
    """Returns whether this host seems to be a container."""
    marks = ("/.dockerenv", "/run/.containerenv")
    return "KUBERNETES_SERVICE_HOST" in environment.snapshot() or any(map(os.path.exists, marks))


def has_rdma() -> bool:
    """Returns whether this host has adapters for RDMA."""
    with suppress(OSError):
        return bool(os.listdir("/sys/class/infiniband"))
    return False


def _memory() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _text(path: Path) -> str:
    """Returns the text of a file of the system; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
