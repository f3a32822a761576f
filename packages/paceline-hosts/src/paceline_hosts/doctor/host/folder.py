"""Tests the shared folder on one host. `examine.py` asks for each step, on all of its hosts at the same time.

look    all hosts     look for the file, which is not there yet: some file systems remember that, and show the file late
make    first host    make a folder with a file in it
use     all hosts     wait for the file; try to make the same folder, a rename, fsync, and the speed of writing
read    all hosts     read the file that the next host wrote
clean   first host    remove the folder
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from paceline.base.errors import cut
from paceline_hosts.doctor.facts import FolderUse

SEEN_S = 5.0  # how long the first host's file is waited for
NUM_BYTES = 16 << 20
_MARKER, _WINNER = "marker", "winner"


class FolderProbe:
    """Carries out this host's part of the test of a folder.

    Args:
        folder: the shared folder.
        token: token of the examination; it is a part of the file names, so that two examinations do not collide.
        number: number of this host.
    """

    def __init__(self, folder: str, token: str, number: int) -> None:
        self._probe = Path(folder, f".paceline-doctor-{token[:16]}")
        self._folder = folder
        self._number = number

    def look(self) -> None:
        """Looks for the file before it is there."""
        # The result does not matter: a file system that remembers missing names, such as NFS, remembers this one now.
        Path(self._probe, _MARKER).exists()

    def make(self) -> str:
        """Makes the folder and a file in it; returns what failed, or "" if nothing did."""
        try:
            self._probe.mkdir()
            draft = self._probe / "marker.draft"
            draft.write_bytes(b"paceline")
            # Checkpoints appear by a rename too, so the test sees what a run would see.
            os.replace(draft, self._probe / _MARKER)
        except OSError as error:
            return _why(error)
        return ""

    def use(self) -> FolderUse:
        """Waits for the first host's file, and then tries the operations that checkpoints need."""
        kind = file_system(self._folder, Path("/proc/mounts"))
        begun = time.monotonic()
        while not self._is_seen():
            if time.monotonic() - begun > SEEN_S:
                return FolderUse(file_system=kind)
            time.sleep(0.01)
        seen_after_s = time.monotonic() - begun
        own = self._probe / f"host{self._number}"
        try:
            fsync_s, write_rate = _write(own)
            won = self._claim()
            replaced = self._rename(own)
        except OSError as error:
            return FolderUse(_why(error), kind, seen_after_s)
        return FolderUse("", kind, seen_after_s, won, replaced, fsync_s, write_rate)

    def _is_seen(self) -> bool:
        # Some file systems remember for a while that a name was missing, but they list a folder anew each time it is opened.
        try:
            return _MARKER in os.listdir(self._probe)
        except OSError:
            return False

    def _claim(self) -> bool:
        """Makes a folder that all hosts try to make, as a save takes its name; returns whether this host made it."""
        try:
            os.mkdir(self._probe / _WINNER)
        except FileExistsError:
            return False
        return True

    def _rename(self, own: Path) -> bool:
        """Returns whether renaming a file onto another replaces it, as the last step of each checkpoint requires."""
        old = own.with_suffix(".old")
        new = own.with_suffix(".new")
        old.write_bytes(b"old")
        new.write_bytes(b"new")
        os.replace(new, old)
        return old.read_bytes() == b"new" and not new.exists()

    def read(self, other: int) -> float:
        """Reads the file of another host, and returns the bytes per second; 0 if the file is missing or not complete."""
        path = self._probe / f"host{other}"
        try:
            begun = time.monotonic()
            with open(path, "rb", buffering=0) as file:
                # This drops the file from the page cache: reading from memory would say nothing about the file system.
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                # It asks for more than there should be, so that a file that is too long is noticed as well.
                size = len(file.read(2 * NUM_BYTES))
        except OSError:
            return 0.0
        seconds = time.monotonic() - begun
        return size / seconds if size == NUM_BYTES and seconds > 0 else 0.0

    def clean(self) -> str:
        """Removes the folder of the test; returns what failed, or "" if nothing did."""
        try:
            shutil.rmtree(self._probe)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return _why(error)
        return ""


def _write(path: Path) -> tuple[float, float]:
    """Returns the seconds to write and sync a few bytes, and the bytes per second of writing and syncing a larger file."""
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
    """Returns the type of the file system that holds a folder; "" if the system does not say.

    Args:
        folder: an absolute path.
        mounts: the system's list of mounts.
    """
    real = os.path.realpath(folder)
    # Mounts can lie inside each other. The longest mount point above the folder is its own; of two mounts at the same point
    # the later one hides the other.
    longest = -1
    kind = ""
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
            longest = len(point)
            kind = name
    return kind


def _why(error: OSError) -> str:
    reason = (error.strerror or str(error)).lower()
    if error.filename:
        reason += f": {error.filename}"
    return cut(reason, 300)
