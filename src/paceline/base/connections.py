"""What is said where the connection to another rank was closed: the rank that says so is seldom the one to blame."""

from __future__ import annotations

import re

_CLOSED = re.compile(
    "Connection closed by peer|Connection reset|Connection refused|Broken pipe|Read error|Write error|"
    "Application timeout caused pair closure|remote process exited|"
    r"another rank has ended\.|has left\.  \[collective-failed\]"
)
# What a rank writes of one that has left without an error (`world/departures.py`), in its own error.
LEFT = "it ended, or left the group, without an error"


def closed(text: str) -> bool:
    """Whether the text of an error, or of its traceback, says that another process closed a connection."""
    return _CLOSED.search(text) is not None
