"""A small process of its own, that ends the workers where the launcher dies without having done so (SIGKILL, a crash).

Run as a plain file, with the standard library alone. On its standard input the launcher says `+PID` for a process
group that lives and `-PID` for one that has ended. End of input means that the launcher is gone: whatever is still
listed gets SIGTERM and, after a moment, SIGKILL; then the launcher's folder of reports (its argument) is removed.
"""

import os
import shutil
import signal
import sys
import time

GRACE_S = 2.0


def main() -> None:
    """Reads until the launcher closes its end or dies."""
    living: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        (living.add if line[0] == "+" else living.discard)(pid)
    end(living)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def end(groups: set[int]) -> None:
    """Ends process groups."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        for group in list(groups):
            if not alive(group, kind):
                groups.discard(group)
        while groups and time.monotonic() < deadline:
            time.sleep(0.05)
            for group in list(groups):
                if not alive(group):
                    groups.discard(group)


def alive(group: int, kind: int = 0) -> bool:
    """Whether a process group has a member; sends it a signal by the way."""
    try:
        os.killpg(group, kind)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its end is the end of its input
    main()
