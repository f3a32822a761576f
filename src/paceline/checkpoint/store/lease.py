"""The lock of a prefix on a store that has no locks: an object that says who writes, renewed while its process lives.

    acquire  nothing there         written under the condition that nothing is there (S3 and most others keep to it)
             a live one            `checkpoint-locked`, once it was seen to be renewed
             one of this run       waited for: its process was lost, and ends soon
             a dead one            taken over: at once if its process died on this host, else when nobody has renewed it
                                   for `LEASE_S` by this host's own clock (clocks of hosts are never compared)
    renew    every `RENEW_S`, by a thread; who finds another's name there has lost it, and says so
    check    before a manifest is written: a process that slept through its lease publishes nothing

Guaranteed: two runs that start at different times never both publish into a prefix, and a stopped one that wakes up does
not either, but for the moment between `check` and the manifest. Not guaranteed: one of two runs that start within the same
moment, on a store without conditional writes, learns of the other only at its next renewal or save.
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
_PARTING_S = 5.0


class Lease:
    """A lease that is held from its construction on.

    Args:
        url: of the object.
        folder: what it guards, for errors.
        who: this run.

    Attributes:
        users: the saves of this process that asked for it and have not let go; the store keeps them.

    Raises:
        CheckpointError: `checkpoint-locked`.
    """

    def __init__(self, url: str, folder: str, who: Mapping[str, str]) -> None:
        self.folder = folder
        self.users: set[object] = set()
        self._url = url
        self._pid = os.getpid()
        self._who = {**who, "id": secrets.token_hex(8), "process": process_name(self._pid)}
        self._beat = 0
        self._acquire()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="paceline-lease", daemon=True)
        self._thread.start()

    def is_mine(self) -> bool:
        """Whether this process took it; a forked child did not."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Asks the store whether this run holds it still.

        Raises:
            CheckpointError: `checkpoint-locked`.
        """
        owner = self._read()
        if owner is None:
            self._acquire()
        elif owner.get("id") != self._who["id"]:
            raise locked(self.folder, owner)

    def release(self) -> None:
        """Lets the thread end, which takes the object away; waits a moment for it, but where it could wait for itself.

        A saver that is collected calls this from whichever thread that happens on, whatever this thread holds: no lock is
        taken here, and no wait is without end.
        """
        self._end.set()
        if threading.current_thread() is not self._thread and not _in_event_loop():
            self._thread.join(_PARTING_S)

    def _acquire(self) -> None:
        while True:
            owner = self._read()
            if owner is not None:
                break
            if objects.write(self._url, self._content(), create=True):
                return
        if owner.get("id") == self._who["id"]:
            return  # it was written, and the answer was lost
        # Another save of this very process, which could not free the object when it ended.
        ours = bool(owner.get("process")) and owner["process"] == self._who["process"]
        if not ours and not _ended(owner) and not self._expires(owner):
            raise locked(self.folder, owner)
        objects.write(self._url, self._content())
        time.sleep(_LOOK_S)  # whoever saw the same has written by now, and the last one has it
        owner = self._read() or {}
        if owner.get("id") != self._who["id"]:
            raise locked(self.folder, owner)

    def _expires(self, owner: dict[str, str]) -> bool:
        """Whether nobody renews a lease for as long as one lasts; waits for it.

        A process of this very run was lost with its host, and may renew its own for some seconds yet.
        """
        lost = bool(self._who.get("run")) and owner.get("run") == self._who["run"]
        lives = _is_local(owner) and process_name(int(owner["pid"])) == owner["process"]
        if lives and not lost:
            return False
        pid, host = owner.get("pid"), owner.get("host")
        _log.info("%s was held by %s on %s; waiting for a sign of life", self.folder, pid, host)
        began = time.monotonic()
        until = began + LEASE_S
        while time.monotonic() < until and not (lost and _ended(owner)):
            time.sleep(_LOOK_S)
            now = self._read()
            if now is None or now == owner:
                continue
            if not lost or now.get("id") != owner.get("id") or time.monotonic() - began > LOST_S:
                return False
            owner = now
            until = time.monotonic() + LEASE_S
        return True

    def _renew(self) -> None:
        while not self._end.wait(RENEW_S):
            try:
                owner = self._read()
                if owner is not None and owner.get("id") != self._who["id"]:
                    _log.error("%s: this run saves no more there", locked(self.folder, owner))
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
    """Whether the number of a process means here what it meant to whoever wrote it."""
    system_of_owner = owner.get("process", "").split()[:2]
    return (
        bool(system_of_owner)
        and system_of_owner == process_name(os.getpid()).split()[:2]
        and owner.get("pid", "").isdigit()
    )


def _ended(owner: dict[str, str]) -> bool:
    return _is_local(owner) and process_name(int(owner["pid"])) != owner["process"]
