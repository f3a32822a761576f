"""What ends a process whose launcher has died, where nobody else is left to do so.

`reaper.py` ends a dead launcher's processes with all that they started; the reaper may have been killed too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tether(launcher: int, signum: int = signal.SIGKILL) -> None:
    """In a process that was started: has the system end it as soon as the launcher has ended (Linux alone can).

    Args:
        launcher: the launcher's pid.
        signum: the signal that ends it.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != launcher:  # it has ended already
        os.kill(os.getpid(), signum)
