"""Reads from /proc the children of a process and its time of computation. On other systems than Linux: nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from paceline.base.process_name import process_fields

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def cpu_s(pid: int) -> float:
    """Returns the seconds for which a process has computed, with all threads, and with children that it has waited for."""
    fields = process_fields(pid)
    ticks = map(int, fields[11:15])  # user and system time, and the same of children
    return sum(ticks) / _TICKS


def tree_cpu_s(pid: int) -> float:
    """Returns the same, with all processes that it has started and that still run."""
    return sum((cpu_s(child) for child in descendants(pid)), start=cpu_s(pid))


def switches(pid: int, thread_id: int) -> int:
    """Returns how often a thread has waited for something and continued; 0 if the system does not say."""
    status = _PROC / str(pid) / "task" / str(thread_id) / "status"
    return int(_field(status, "voluntary_ctxt_switches") or 0)


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, and that still run."""
    pids: list[int] = []
    for file in sorted((_PROC / str(pid) / "task").glob("*/children")):
        try:
            pids += map(int, file.read_text().split())
        except OSError:  # the thread has ended in the meantime
            continue
    return sorted(pids)


def descendants(pid: int) -> Iterator[int]:
    """Yields the processes that a process has started, and all that those have started."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def command(pid: int) -> str:
    """Returns the command line of a process; "" if there is no such process."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()


def catches(pid: int, signum: int) -> bool:
    """Returns whether a process has a handler for a signal. A signal without a handler may end the process."""
    caught = int(_field(_PROC / str(pid) / "status", "SigCgt") or "0", 16)
    return bool(caught >> (signum - 1) & 1)


def _field(file: Path, name: str) -> str:
    """Returns a field of a status file; "" if the process has ended, or if the system does not say."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""
