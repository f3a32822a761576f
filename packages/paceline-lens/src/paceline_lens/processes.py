"""Whether a process is there."""

from __future__ import annotations

import os


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
