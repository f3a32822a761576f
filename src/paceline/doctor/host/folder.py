"""What a host does in the shared folder: each step is asked for by `examine.py`, on all hosts at the same time.

look    all hosts     nothing is there yet; a file system that remembers this shows it later, as in a run
make    first host    a folder with a file, which is then locked
use     all hosts     the file is waited for; lock, exclusive link, rename, fsync, speed of writing
read    all hosts     the file that the next host wrote
clean   first host    the folder is removed
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import IO

from paceline.base.errors import cut
from paceline.doctor.facts import FolderUse

SEEN_S = 5.0  # how long the first host's file is waited for
NUM_BYTES = 16 << 20
_MARKER, _LOCK, _WINNER = "marker", "lock", "winner"


class FolderProbe:
    """This host's part in trying a folder.

    Args:
        folder: the shared folder.
        token: names what is made in it, so that examinations do not meet.
        number: of this host.
    """

    def __init__(self, folder: str, token: str, number: int) -> None:
        self._probe = Path(folder, f".paceline-doctor-{token[:16]}")
        self._folder, self._number = folder, number
        self._locked: IO[bytes] | None = None

    def look(self) -> None:
        """Looks for what is not there yet."""
        Path(self._probe, _MARKER).exists()

    def make(self) -> str:
        """Makes the folder and a file in it, and locks that; returns what failed."""
        try:
            self._probe.mkdir()
            draft = self._probe / "marker.draft"
            draft.write_bytes(b"paceline")
            os.replace(draft, self._probe / _MARKER)
        except OSError as error:
            return _why(error)
        self._lock()
        return ""

    def _lock(self) -> bool:
        """Locks the file; whether nobody else had."""
        import fcntl

        file = open(self._probe / _LOCK, "ab")  # noqa: SIM115  (its end frees the lock)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._locked = file
        return True

    def use(self) -> FolderUse:
        """Waits for the first host's file, then tries what checkpoints need of a folder."""
        kind = file_system(self._folder, Path("/proc/mounts"))
        begun = time.monotonic()
        while not self._is_seen():
            if time.monotonic() - begun > SEEN_S:
                return FolderUse(file_system=kind)
            time.sleep(0.01)
        seen_after_s = time.monotonic() - begun
        own = self._probe / f"host{self._number}"
        try:
            excludes = None if self._locked else not self._lock()
            fsync_s, write_rate = _write(own)
            won = self._link(own)
            replaced = self._rename(own)
        except OSError as error:
            return FolderUse(_why(error), kind, seen_after_s)
        return FolderUse("", kind, seen_after_s, excludes, won, replaced, fsync_s, write_rate)

    def _is_seen(self) -> bool:
        # Some file systems remember for a while that a name was missing, but always list a folder anew when it is opened.
        try:
            return _MARKER in os.listdir(self._probe)
        except OSError:
            return False

    def _link(self, own: Path) -> bool:
        """Whether this host was the first to give the name; of all hosts, one may be."""
        try:
            os.link(own, self._probe / _WINNER)
        except FileExistsError:
            return False
        return True

    def _rename(self, own: Path) -> bool:
        """Whether a file that is renamed takes the place of another, as the end of each checkpoint needs it."""
        old, new = own.with_suffix(".old"), own.with_suffix(".new")
        old.write_bytes(b"old")
        new.write_bytes(b"new")
        os.replace(new, old)
        return old.read_bytes() == b"new" and not new.exists()

    def read(self, other: int) -> float:
        """Reads what another host wrote; returns bytes a second, 0 where it is not there whole."""
        path = self._probe / f"host{other}"
        try:
            begun = time.monotonic()
            with open(path, "rb", buffering=0) as file:
                # What lies in this host's own memory says nothing about the file system.
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                size = len(file.read(2 * NUM_BYTES))
        except OSError:
            return 0.0
        seconds = time.monotonic() - begun
        return size / seconds if size == NUM_BYTES and seconds > 0 else 0.0

    def clean(self) -> str:
        """Removes what was made; returns what failed."""
        if self._locked:
            self._locked.close()
            self._locked = None
        try:
            shutil.rmtree(self._probe)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return _why(error)
        return ""


def _write(path: Path) -> tuple[float, float]:
    """Seconds to write and sync a few bytes, and bytes a second of writing and syncing a larger file."""
    begun = time.monotonic()
    _write_synced(path, b"paceline")
    fsync_s = time.monotonic() - begun
    data = bytes(NUM_BYTES)
    begun = time.monotonic()
    _write_synced(path, data)
    return fsync_s, NUM_BYTES / max(time.monotonic() - begun, 1e-9)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def file_system(folder: str, mounts: Path) -> str:
    """Type of the file system that a folder lies on; "" where the system does not say.

    Args:
        folder: an absolute path.
        mounts: the system's list of mounts.
    """
    real = os.path.realpath(folder)
    longest, kind = -1, ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        # "device point kind options 0 0", where a space in a path is \040.
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            longest, kind = len(point), name
    return kind


def _why(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    if error.filename:
        reason += f": {error.filename}"
    return cut(reason, 300)
