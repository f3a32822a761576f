"""Recognises errors that say that the connection to another rank was closed or timed out.

The rank that reports such an error is seldom the one that caused it: the other rank failed first.
"""

from __future__ import annotations

import re

# An error without one of these words is about a connection that the script itself has opened.
_BACKEND = re.compile("gloo|nccl|c10d|ProcessGroup", re.IGNORECASE)
_CLOSED = re.compile(
    "Connection closed by peer|Connection reset|Connection refused|Broken pipe|Read error|Write error|"
    "Application timeout caused pair closure|remote process exited"
)
_OURS = re.compile(r"failed, as (another rank has ended|rank \d+ has left)\.  \[collective-failed\]")
_LATE = re.compile("timed out", re.IGNORECASE)
# A rank writes these words into its own error, if another rank has left without an error (`world/departures.py`).
LEFT = "it ended, or left the group, without an error"


def closed(text: str) -> bool:
    """Returns whether the text of an error, or of its traceback, says that another process closed a connection."""
    return _OURS.search(text) is not None or (_of_backend(text) and _CLOSED.search(text) is not None)


def late(text: str) -> bool:
    """Returns whether the text says that another process did not answer in time."""
    return _of_backend(text) and _LATE.search(text) is not None


def _of_backend(text: str) -> bool:
    return _BACKEND.search(text) is not None
