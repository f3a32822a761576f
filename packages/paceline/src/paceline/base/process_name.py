"""Names a process uniquely, and says its state. The system uses process numbers again: one can mean another process later."""

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
        fields = process_fields(pid)
        # A process that was killed keeps its entry until its parent has asked for its exit code.
        if not fields or fields[0] in ("Z", "X"):
            return ""
        started = fields[19]  # field 22 of the whole line
        return f"{system} {os.readlink(f'/proc/{os.getpid()}/ns/pid')} {started}"
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """Returns the letter of the state of a process; "" if there is no such process, or if the system does not say.

    "R" runs, "S" waits, "D" waits for a disk, "T" was stopped, "t" is in a debugger, "Z" has ended.
    """
    fields = process_fields(pid)
    return fields[0] if fields else ""


def process_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name of the command; [] if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name stands in parentheses, and may itself contain blanks and parentheses.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
