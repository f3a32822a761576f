"""The lock of a prefix on a store without locks: an object with the name of the owner, which the owner renews while it runs.

    acquire  no object             it is written on the condition that there is none (S3 and most others support this)
             owner is alive        `checkpoint-locked`, once the object was renewed
             owner is of this run  it waits: that process was lost, and ends soon
             owner is dead         it takes over: at once if the process ended on this host, else if nobody renews the
                                   object for `LEASE_S` by the clock of this host (clocks of hosts are not compared)
    renew    every `RENEW_S`, by a thread; if it finds another owner, the lease is lost, and it logs an error
    check    before a manifest is written: a process that was stopped for longer than its lease publishes nothing

Two runs that start at different times never both publish into a prefix. Neither does a process that was stopped and goes on,
except in the moment between `check` and the manifest. If two runs start in the same moment, on a store without conditional
writes, one of them learns of the other only at its next renewal or save.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping

from paceline.base.errors import CheckpointError
from paceline.base.process_name import process_name
from paceline.checkpoint.store import objects
from paceline.checkpoint.store.lock import LOST_S, locked, owner_in

_log = logging.getLogger("paceline.checkpoint")
LEASE_S = 30.0
RENEW_S = 8.0
_LOOK_S = 1.0
_ATTEMPTS = 5
_RELEASE_S = 5.0  # how long `release` waits until the thread has deleted the object; if it does not, the lease expires


class Lease:
    """A lease, which this process holds from its construction until its last user leaves.

    Args:
        url: the URL of the object.
        folder: the folder that the lease guards, for errors.
        who: a description of this run.

    Raises:
        CheckpointError: `checkpoint-locked`; `checkpoint-store-failed`, if the object can neither be read nor created.
    """

    def __init__(self, url: str, folder: str, who: Mapping[str, str]) -> None:
        self.folder = folder
        self._users: set[object] = set()
        # It is reentrant, since the garbage collector may run `leave` on a thread that has it. No thread waits while it has it.
        self._users_lock = threading.RLock()
        self._url = url
        self._pid = os.getpid()
        self._who = {**who, "id": secrets.token_hex(8), "process": process_name(self._pid)}
        self._beat = 0
        self._acquire()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="paceline-lease", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Returns whether this process took the lease and has not released it; a forked child inherits only the object."""
        return self._pid == os.getpid() and not self._end.is_set()

    def join(self, user: object) -> bool:
        """Adds a user. Returns False if it comes too late, because the lease is not held any more."""
        if not self.is_held():
            return False
        with self._users_lock:
            self._users.add(user)
            return self.is_held()

    def leave(self, user: object) -> None:
        """Removes a user, and releases the lease after the last one."""
        if not self.is_held():
            return
        with self._users_lock:
            self._users.discard(user)
            if self._users:
                return
            # Set while no other thread can join, so that none joins a lease that ends.
            self._end.set()
        self.release()

    def check(self) -> None:
        """Asks the store whether this run still holds the lease.

        Raises:
            CheckpointError: `checkpoint-locked`.
        """
        owner = self._read()
        # Somebody has removed the object. So nobody holds the lease, and it can be taken again.
        if owner is None:
            self._acquire()
        elif owner.get("id") != self._who["id"]:
            raise locked(self.folder, owner)

    def release(self) -> None:
        """Tells the thread to end and to delete the object, and waits a moment for that.

        The garbage collector may call this through a saver, on any thread and whatever locks that thread holds. So every wait
        has a limit. The lease's own thread and an event loop do not wait at all: they would wait for themselves.
        """
        self._end.set()
        if threading.current_thread() is not self._thread and not _in_event_loop():
            self._thread.join(_RELEASE_S)

    def _acquire(self) -> None:
        for _ in range(_ATTEMPTS):
            owner = self._read()
            if owner is not None:
                break
            if objects.write(self._url, self._content(), create=True):
                return
            # Another run has taken the lease since it was read, and may have freed it again.
            time.sleep(_LOOK_S)
        else:
            raise CheckpointError(
                "checkpoint-store-failed",
                f"{self.folder} cannot be locked against other runs.",
                why=f"the store says that {self._url} exists, and has nothing to read there ({_ATTEMPTS} attempts)",
                fix="delete that name, or the folder of that name; this process must also be allowed to read there",
            )
        if owner.get("id") == self._who["id"]:
            return  # the object was written, but the answer of the store was lost
        # An earlier save of this process may have failed to delete the object when it ended.
        is_of_this_process = bool(owner.get("process")) and owner["process"] == self._who["process"]
        if not is_of_this_process and not _ended(owner) and not self._expires(owner):
            raise locked(self.folder, owner)
        objects.write(self._url, self._content())
        # Another run may take over from the same dead owner. After this pause it has written too. The last one to write has the
        # lease, and all others find its name.
        time.sleep(_LOOK_S)
        owner = self._read() or {}
        if owner.get("id") != self._who["id"]:
            raise locked(self.folder, owner)

    def _expires(self, owner: dict[str, str]) -> bool:
        """Waits for the duration of a lease, and returns whether nobody has renewed it.

        A process of the same run was lost with its host, and may still renew its lease for some seconds.
        """
        lost = bool(self._who.get("run")) and owner.get("run") == self._who["run"]
        lives = _is_local(owner) and process_name(int(owner["pid"])) == owner["process"]
        # A process of another run is alive on this host, so there is no need to wait for a renewal.
        if lives and not lost:
            return False
        pid = owner.get("pid")
        host = owner.get("host")
        _log.info("%s was held by %s on %s; waiting whether that process renews its lease", self.folder, pid, host)
        began = time.monotonic()
        until = began + LEASE_S
        while time.monotonic() < until and not (lost and _ended(owner)):
            time.sleep(_LOOK_S)
            current = self._read()
            if current is None or current == owner:
                continue
            # The lease was renewed or taken. Only a lost process of this run gets more time, and no more than `LOST_S`.
            waited_s = time.monotonic() - began
            if not lost or current.get("id") != owner.get("id") or waited_s > LOST_S:
                return False
            owner = current
            until = time.monotonic() + LEASE_S
        return True

    def _renew(self) -> None:
        while not self._end.wait(RENEW_S):
            try:
                owner = self._read()
                if owner is not None and owner.get("id") != self._who["id"]:
                    _log.error("%s: this run no longer saves there", locked(self.folder, owner))
                    return
                self._beat += 1
                objects.write(self._url, self._content())
            except CheckpointError as error:
                _log.warning("could not renew the lease of %s, which lasts %.0f s: %s", self.folder, LEASE_S, error)
        try:
            if (self._read() or {}).get("id") == self._who["id"]:
                objects.delete(self._url)
        except CheckpointError as error:
            _log.warning("could not free %s (%s); it is free in %.0f s", self.folder, error, LEASE_S)

    def _content(self) -> bytes:
        return json.dumps({**self._who, "beat": str(self._beat)}).encode()

    def _read(self) -> dict[str, str] | None:
        content = objects.read(self._url)
        return None if content is None else owner_in(content)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _is_local(owner: dict[str, str]) -> bool:
    """Returns whether the process of an owner is on this system, so that its process number means something here."""
    system_of_owner = owner.get("process", "").split()[:2]
    return (
        bool(system_of_owner)
        and system_of_owner == process_name(os.getpid()).split()[:2]
        and owner.get("pid", "").isdigit()
    )


def _ended(owner: dict[str, str]) -> bool:
    return _is_local(owner) and process_name(int(owner["pid"])) != owner["process"]
