"""A small process that ends the workers if the launcher dies before it has done so (by SIGKILL, or in a crash).

It runs as a plain file and imports only the standard library. The launcher writes `+PID` to its standard input for a
process group that has started, and `-PID` for one that has ended. The end of the input means that the launcher is gone.
Then each group that is still listed gets SIGTERM and, after a moment, SIGKILL, and the launcher's folder of reports (the
argument) is removed.
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
        if line[0] == "+":
            living.add(pid)
        else:
            living.discard(pid)
    end(living)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


def end(groups: set[int]) -> None:
    """Ends process groups: asks them with SIGTERM, waits up to `GRACE_S`, and kills those that are left."""
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
    """Returns whether a process group has a member, and sends the group a signal; signal 0 only checks."""
    try:
        os.killpg(group, kind)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal to all processes of a job must not end the reaper before the launcher has ended.
        signal.signal(number, signal.SIG_IGN)
    main()
