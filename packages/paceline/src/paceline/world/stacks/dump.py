"""Lets a process write the stacks of all its threads when it gets one of two signals. `collect` reads them.

    STACKS    a signal that nothing else uses: the launcher sends it to a rank, and to the processes that the rank has forked
    SIGUSR1   for people: the launcher (or a rank, under torchrun) notices that the file has grown, and reports all ranks

faulthandler writes in C from the signal handler. So it also writes while the main thread is in compiled code, and while another
thread holds the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from dataclasses import dataclass
from pathlib import Path

# A real-time signal, if the system has them. A process with a handler for it belongs to Paceline.
STACKS = getattr(signal, "SIGRTMAX", 0) - 7 if hasattr(signal, "SIGRTMAX") else 0
FOLDER = "PACELINE_STACKS_DIR"


@dataclass(frozen=True)
class DumpFiles:
    """Names the files of one process, in the folder that all ranks of a host share.

    Args:
        folder: the folder.
        pid: the process.
    """

    folder: Path
    pid: int

    @property
    def stacks(self) -> Path:
        """The stacks that the launcher has requested, one dump after the other."""
        return self.folder / f"{self.pid}.stacks"

    @property
    def asked(self) -> Path:
        """The stacks that a person has requested with SIGUSR1. When the file grows, those of all ranks are reported."""
        return self.folder / f"{self.pid}.asked"

    @property
    def progress(self) -> Path:
        """The report of the rank about its progress (`ProgressReport`)."""
        return self.folder / f"{self.pid}.progress"


def enter(folder: Path) -> None:
    """Installs the handlers of both signals in this process; processes that it forks inherit them.

    If the script later installs a handler of its own for SIGUSR1, that one counts.
    """
    files = DumpFiles(folder, os.getpid())
    if STACKS:
        faulthandler.register(STACKS, file=_appending(files.stacks), all_threads=True)
    if hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, file=_appending(files.asked), all_threads=True)


def leave(files: DumpFiles) -> None:
    """Removes the files of this process; the last process of a host removes the folder too."""
    for path in (files.stacks, files.asked):
        path.unlink(missing_ok=True)
    # Another rank may still have its files there, or may have removed the folder.
    with contextlib.suppress(OSError):
        files.folder.rmdir()


def _appending(path: Path) -> int:
    """Opens a file that stays open, because faulthandler keeps its number."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
