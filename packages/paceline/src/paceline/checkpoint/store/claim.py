"""The claim of a save: a record beside what it writes, which says whose it is, so that others know what was left behind.

Nothing is locked, and nothing is renewed. A save writes into a folder of its own, and an automatic name is taken by creating
what must not exist yet. So two runs never write the same files. The record only decides who may delete an unfinished save:

    its process has ended           anybody on the same host, at once; this process too, once a save of its own has failed
    it is of the same run           a process that the launcher has started since, because the first one has ended or was lost
    anything else                   anybody, a day after it began

A save whose files are deleted although its process lives (it was suspended for a day, or its host was cut off) fails, and
publishes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping

from paceline.base import env
from paceline.base.process_name import process_name

ABANDONED_S = 24 * 3600.0
_under_way: set[str] = set()  # paths that this process writes or removes


class NameTakenError(Exception):
    """Another save has taken the automatic name, or has published under it."""


def record() -> dict[str, str]:
    """Returns the record of this process: where it runs, since when it saves, and the launcher's name of its run."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "pid": str(pid),
        "process": process_name(pid),
        "since": str(time.time()),
        "run": env.get("PACELINE_RUN"),
    }


def begin(path: str, **fields: str) -> bytes:
    """Begins to write or to remove a path; returns the record of this process, with more fields, as the content of a file."""
    _under_way.add(path)
    return json.dumps({**record(), **fields}).encode()


def end(path: str) -> None:
    """Ends what `begin` has begun, whether it succeeded or not."""
    _under_way.discard(path)


def decoded(content: bytes) -> dict[str, str]:
    """Returns a record; an empty dict if its process was killed while it wrote it, or an older Paceline wrote none."""
    try:
        fields = json.loads(content)
    except ValueError:
        return {}
    if not isinstance(fields, dict):
        return {}
    return {str(name): str(value) for name, value in fields.items()}


def is_mine(who: Mapping[str, str]) -> bool:
    """Returns whether a record is of this process."""
    pid = os.getpid()
    return who.get("pid") == str(pid) and who.get("process") == process_name(pid)


def is_running(who: Mapping[str, str]) -> bool | None:
    """Returns whether the process of a record runs; None if that cannot be seen from this host or container."""
    system = who.get("process", "").split()[:2]
    pid = who.get("pid", "")
    if not system or system != process_name(os.getpid()).split()[:2] or not pid.isdigit():
        return None
    return process_name(int(pid)) == who["process"]


def is_abandoned(path: str, who: Mapping[str, str]) -> bool:
    """Returns whether anybody may delete a path with this record; see the docstring of this module."""
    if is_mine(who):
        return path not in _under_way
    running = is_running(who)
    if running is not None:
        return not running
    run = env.get("PACELINE_RUN")
    if run and who.get("run") == run:
        return True
    try:
        since = float(who.get("since", "0"))
    except ValueError:
        since = 0.0
    return time.time() - since > ABANDONED_S
