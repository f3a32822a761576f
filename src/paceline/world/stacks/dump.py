"""The side of the process whose stacks are wanted: two signals upon which it writes the stacks of all its threads.

    STACKS    a signal that nothing else uses: the launcher sends it to a rank, and to what the rank has forked
    SIGUSR1   for people: the stacks go to a file whose growth the launcher (or, under torchrun, a rank) notices

faulthandler writes from the signal handler, in C: so it does while the main thread is inside of compiled code, and while
another thread keeps the interpreter's lock.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from paceline.base import env
from paceline.base.temporary import temporary_folder

# A real-time signal where there are such: a process that has a handler for it is one of ours.
STACKS = getattr(signal, "SIGRTMAX", 0) - 7 if hasattr(signal, "SIGRTMAX") else 0
FOLDER = "PACELINE_STACKS_DIR"
REPORTING = "reporting"  # the file that a process of a host locks while it reports


@dataclass(frozen=True)
class Files:
    """The files of one process, in the folder that all ranks of a host share.

    Args:
        folder: that folder.
        pid: the process.
    """

    folder: Path
    pid: int

    @property
    def stacks(self) -> Path:
        """Stacks that the launcher has asked for, one dump after the other."""
        return self.folder / f"{self.pid}.stacks"

    @property
    def asked(self) -> Path:
        """Stacks that a person has asked for by SIGUSR1: when it grows, those of all ranks are wanted."""
        return self.folder / f"{self.pid}.asked"

    @property
    def progress(self) -> Path:
        """What the rank says of its progress."""
        return self.folder / f"{self.pid}.progress"


def enter(folder: Path) -> None:
    """Has this process write its stacks upon the signals, from now on; what it forks does so too.

    A handler that the script installs later for SIGUSR1 takes its place.
    """
    files = Files(folder, os.getpid())
    if STACKS:
        faulthandler.register(STACKS, file=_appending(files.stacks), all_threads=True)
    if hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, file=_appending(files.asked), all_threads=True)


def leave(files: Files) -> None:
    """Removes what this process has written; the last process of a host removes the folder too."""
    for path in (files.stacks, files.asked):
        path.unlink(missing_ok=True)
    if not files.folder.is_dir():
        return
    remaining = {path.name for path in files.folder.iterdir()}
    if remaining <= {REPORTING}:
        shutil.rmtree(files.folder, ignore_errors=True)


def folder_of_launcher() -> Path | None:
    """The folder that the launcher of this process has named; None where none did, or it has ended."""
    name = env.get(FOLDER)
    if not name or not os.path.isdir(name):
        return None
    return Path(name)


def _appending(path: Path) -> int:
    """A file that stays open: faulthandler keeps its number."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def folder_under_torchrun() -> Path | None:
    """A folder that the ranks of this host share under torchrun, made by the first; this process writes its stacks there.

    None without torchrun, and where the folder is not this user's own.
    """
    if env.get("TORCHELASTIC_RUN_ID") is None or not hasattr(os, "getuid"):
        return None
    folder = Path(temporary_folder()) / f"paceline-stacks-{os.getuid()}-{os.getppid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        return None
    enter(folder)
    return folder
