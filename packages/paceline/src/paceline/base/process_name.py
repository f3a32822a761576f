"""Names a process uniquely. The system uses process numbers again, so a number alone can mean another process later."""

from __future__ import annotations

import os


def process_name(pid: int) -> str:
    """Returns a name that no other process ever has; "" if the process has ended or the system is not Linux.

    The name has three words: the boot of the system, the PID namespace, and the start time of the process. The first two
    are the same for all processes whose numbers can be compared.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            system = file.read().strip()
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program stands in parentheses and may hold blanks and parentheses itself, so the fields are
            # counted after the last one. Field 22 of the whole line is the start time.
            fields = file.read().rpartition(")")[2].split()
        # A process that was killed keeps its entry until its parent has asked for its exit code.
        if fields[0] in ("Z", "X"):
            return ""
        started = fields[19]
        return f"{system} {os.readlink(f'/proc/{os.getpid()}/ns/pid')} {started}"
    except OSError:
        return ""


def process_exists(pid: int) -> bool:
    """Returns whether a process has this number, even if it belongs to another user."""
    try:
        # Signal 0 only checks that the process could be signalled.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process, so it exists
        return True
    return True
