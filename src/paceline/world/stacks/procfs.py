"""What Linux tells of a process in /proc: its state, its children, the time that it has computed. Elsewhere: nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def state(pid: int) -> str:
    """The letter of a process's state: "R" runs, "S" waits, "D" waits for a disk, "T" was stopped, "t" is in a debugger,
    "Z" has ended; "" where there is no such process, or the system does not tell."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def cpu_s(pid: int) -> float:
    """Seconds that a process has computed, in all its threads, and in those of its children that it has waited for."""
    fields = _stat(pid)
    ticks = map(int, fields[11:15])  # user, system, and the same of children
    return sum(ticks) / _TICKS


def tree_cpu_s(pid: int) -> float:
    """The same, with all that the process has started and that still runs."""
    return sum((cpu_s(child) for child in descendants(pid)), start=cpu_s(pid))


def switches(pid: int, thread_id: int) -> int:
    """How often a thread has waited for something and gone on; 0 where the system does not tell."""
    return int(_field(_PROC / str(pid) / "task" / str(thread_id) / "status", "voluntary_ctxt_switches") or 0)


def children(pid: int) -> list[int]:
    """The processes that a process has started, and that still run."""
    pids: list[int] = []
    for file in sorted((_PROC / str(pid) / "task").glob("*/children")):
        try:
            pids += map(int, file.read_text().split())
        except OSError:  # the thread has ended in the meantime
            continue
    return sorted(pids)


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have started."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def command(pid: int) -> str:
    """The command line of a process; "" where there is none."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal; another signal than its handlers' may end it."""
    caught = int(_field(_PROC / str(pid) / "status", "SigCgt") or "0", 16)
    return bool(caught >> (signum - 1) & 1)


def _field(file: Path, name: str) -> str:
    """A field of a status file; "" where the process has ended, or the system does not tell."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, which may hold blanks; [] where there is no such process."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
