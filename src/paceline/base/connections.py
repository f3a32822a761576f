"""What is said where the connection to another rank was closed: the rank that says so is seldom the one to blame."""

from __future__ import annotations

import re

_BACKEND = re.compile("gloo|nccl|c10d|ProcessGroup", re.IGNORECASE)  # else it is about a connection of the script's own
_CLOSED = re.compile(
    "Connection closed by peer|Connection reset|Connection refused|Broken pipe|Read error|Write error|"
    "Application timeout caused pair closure|remote process exited"
)
_OURS = re.compile(r"failed, as (another rank has ended|rank \d+ has left)\.  \[collective-failed\]")
_LATE = re.compile("timed out", re.IGNORECASE)
# What a rank writes of one that has left without an error (`world/departures.py`), in its own error.
LEFT = "it ended, or left the group, without an error"


def closed(text: str) -> bool:
    """Whether the text of an error, or of its traceback, says that another process closed a connection."""
    return _OURS.search(text) is not None or (_of_backend(text) and _CLOSED.search(text) is not None)


def late(text: str) -> bool:
    """Whether the text says that another process did not come in time."""
    return _of_backend(text) and _LATE.search(text) is not None


def _of_backend(text: str) -> bool:
    return _BACKEND.search(text) is not None
