"""The lock of a folder, into which one run writes at a time; it names the host, process, time and command of that run.

The lock of FOLDER is the file `.NAME.lock` beside it, not in it: `publish` exchanges whole folders, and a lock that moved
with the old one would guard nothing for a moment. It is a POSIX record lock (`fcntl.lockf`): the kernel releases it when
the process ends in any way, forked children (loader workers) do not inherit it, and shared file systems carry it to other
hosts. A process also loses such a lock when it closes any other descriptor of the same file. So only this module opens
the file, and once in a process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from paceline.base import env
from paceline.base.errors import CheckpointError

_log = logging.getLogger("paceline.checkpoint")
_LOCKED_BY_ANOTHER = (errno.EACCES, errno.EAGAIN)
LOST_S = 100.0  # NFS frees the locks of a host that is gone after 90 s
_LOOK_S = 0.2
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def this_run() -> dict[str, str]:
    """Returns a description of this process, for the lock and for the error that another run shows."""
    return {
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "since": datetime.now(UTC).isoformat(" ", "seconds"),
        "command": shlex.join(sys.argv)[:300],
        "run": env.get("PACELINE_RUN"),
    }


def locked(folder: str, other: Mapping[str, str]) -> CheckpointError:
    """Returns the error for a folder that another run holds."""
    holder = [f"{key} {other[key]}" for key in ("host", "pid", "since") if other.get(key)]
    reasons = [", ".join(holder) or "it has not said which"]
    if other.get("command"):
        reasons.append(f"its command: {other['command']}")
    return CheckpointError(
        "checkpoint-locked",
        f"another run saves into {folder}.",
        why=reasons,
        fix="end that run, wait for its end, or give this run another `project_dir`",
    )


@dataclass
class _Lock:
    """A lock of this process: the open file, the process that opened it, and how many users it has."""

    file: int
    pid: int
    times: int = 1


_locks: dict[str, _Lock] = {}
# It is reentrant, since the garbage collector may release the lock of one saver on a thread that is taking another.
_guard = threading.RLock()


def hold_local(folder: str, who: Mapping[str, str]) -> Callable[[], None]:
    """Takes the lock of a local or shared folder; see `Store.hold`."""
    parent, name = os.path.split(os.path.realpath(folder))
    path = os.path.join(parent, f".{name}.lock")
    with _guard:
        lock = _locks.get(path)
        # A forked child inherits this table, but not the locks in it.
        if lock is not None and lock.pid == os.getpid():
            lock.times += 1
        else:
            os.makedirs(parent, exist_ok=True)
            _locks[path] = _Lock(_acquire(path, folder, who), os.getpid())
    released = False

    def release() -> None:
        nonlocal released
        with _guard:
            lock = _locks.get(path)
            if released or lock is None or lock.pid != os.getpid():
                return
            released = True
            lock.times -= 1
            if not lock.times:
                del _locks[path]
                # The name goes while the file is still locked. Whoever gets the lock of this file next then sees that it
                # has no name any more (`_has_name`), and opens a new one.
                os.unlink(path)
                os.close(lock.file)

    return release


def _acquire(path: str, folder: str, who: Mapping[str, str]) -> int:
    """Opens and locks the file that has the name, not one that its holder is removing.

    It waits for a process of the same run that was lost with its host: that one may live for some more seconds, and a file
    server keeps the locks of a host that is gone for a while.

    Raises:
        CheckpointError: `checkpoint-locked`; `checkpoint-not-writable`, if the opened file never has the name.
    """
    deadline = time.monotonic() + LOST_S
    logged = False
    while True:
        file, owner = _try_once(path, who)
        if file is not None:
            return file
        is_too_late = time.monotonic() > deadline
        if owner is not None:
            is_of_same_run = bool(who.get("run")) and owner.get("run") == who["run"]
            if not is_of_same_run or is_too_late:
                raise locked(folder, owner)
            if not logged:
                logged = True
                where = f"pid {owner.get('pid')} on {owner.get('host')}"
                _log.warning(
                    "%s is locked by %s, which was lost from this run; waiting up to %.0f s", folder, where, LOST_S
                )
        elif is_too_late:
            # Some file systems in user space give a file another inode number at each look, so it never has its name.
            raise CheckpointError(
                "checkpoint-not-writable",
                f"the lock file {path} cannot be held.",
                why=f"it was replaced, or had another inode number, at each attempt for {LOST_S:.0f} s",
                fix="save into a folder of another file system",
            )
        time.sleep(_LOOK_S)


def _try_once(path: str, who: Mapping[str, str]) -> tuple[int | None, dict[str, str] | None]:
    """Opens the lock file, locks it and writes `who` into it.

    Returns:
        The file, or None if it was not locked; then also the owner if another process holds the lock, or None if the file was
        removed or replaced in the meantime.
    """
    file = _open(path)
    if file is None:
        return None, None
    try:
        owner = _lock(file, path)
        if owner is None and _has_name(file, path):
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(dict(who)).encode(), 0)
            return file, None
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None, owner


def _open(path: str) -> int | None:
    """Opens the lock file, or creates it; returns None if a link had its name, which is removed then.

    A link, symbolic or hard, is never followed: its target belongs to somebody else and would be overwritten.

    Raises:
        CheckpointError: `checkpoint-not-writable`, if something else than a file has the name.
    """
    # O_NONBLOCK: a device or a named pipe may have the name, and opening it could wait without end.
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK):
            raise
        _remove_link(path)
        return None
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return file
    os.close(file)
    if stat.S_ISREG(status.st_mode):
        _remove_link(path)
        return None
    raise CheckpointError(
        "checkpoint-not-writable",
        f"{path} is no ordinary file, but has the name of the folder's lock file.",
        why="a run locks the folder that it saves into",
        fix=f"look at what it is, and remove it: `rm {shlex.quote(path)}`",
    )


def _remove_link(path: str) -> None:
    _log.warning(
        "%s was a link, where the lock of a folder belongs: the link was removed, not what it pointed to", path
    )
    with contextlib.suppress(FileNotFoundError):  # another process removed it first
        os.unlink(path)


def _lock(file: int, path: str) -> dict[str, str] | None:
    """Locks the file; returns the owner if another process holds the lock, and None otherwise."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED_BY_ANOTHER:
            return owner_in(os.pread(file, 1 << 16, 0))
        if error.errno not in _NO_LOCKS_HERE:
            raise
        _log.warning(
            "the file system of %s has no locks (%s): nothing keeps a second run from saving there too",
            path,
            error.strerror,
        )
    return None


def _has_name(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def owner_in(content: bytes) -> dict[str, str]:
    """Returns what the owner of a lock wrote into it; an empty dict if it has not done so yet."""
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    if not isinstance(owner, dict):
        return {}
    return {str(key): str(value) for key, value in owner.items()}
