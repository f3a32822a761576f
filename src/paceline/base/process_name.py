"""A name of a process that no other ever has, so that a number that was used again is recognised."""

from __future__ import annotations

import os


def process_name(pid: int) -> str:
    """The system's start, its space of process numbers, and the start of the process; "" where there is none to read.

    Only Linux tells them. Of the name the first two words are the same for all processes that share numbers.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            system = file.read().strip()
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            started = file.read().rpartition(")")[2].split()[19]
        return f"{system} {os.readlink(f'/proc/{os.getpid()}/ns/pid')} {started}"
    except OSError:
        return ""


def process_exists(pid: int) -> bool:
    """Whether some process has this number, another user's included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
