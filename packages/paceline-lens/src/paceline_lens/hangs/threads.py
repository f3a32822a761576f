"""Finds where a thread is: the line of the script, and the operation that may wait for other ranks."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paceline.world.places import PASSED_THROUGH, TORCH, line_of, users_frames

_PACELINE = str(Path(str(sys.modules["paceline"].__file__)).parent) + os.sep
# The code that may wait for other ranks. The loaders of `paceline/data` wait too, but for samples.
_MAY_WAIT = (
    *(f"{_PACELINE}{package}{os.sep}" for package in ("world", "parallel", "checkpoint")),
    f"{TORCH}distributed{os.sep}",
    f"{TORCH}nn{os.sep}parallel{os.sep}distributed.py",
    f"{TORCH}autograd{os.sep}graph.py",  # calls the engine, which runs the hooks that reduce gradients
)
_TORCH_CALLS = (f"{TORCH}_ops.py", f"{TORCH}utils{os.sep}")  # frames between an operator and its caller
# Code that blocks until other ranks have arrived. In other files a thread waits if its line calls `wait` of a work, which is
# compiled code and has no frame of its own.
_COLLECTIVES = (
    f"{TORCH}distributed{os.sep}distributed_c10d.py",
    f"{TORCH}distributed{os.sep}_functional_collectives.py",
    f"{_PACELINE}world{os.sep}network{os.sep}links.py",  # carries the small messages of `reduce`, `gather` and the like
)
# Since 3.12, Python collects garbage between two instructions only, and not while it allocates an object.
_COLLECTS_WHILE_IT_ALLOCATES = sys.version_info < (3, 12)
_collection_paused = threading.Lock()
# A child that is forked while a thread reads a stack would never collect garbage again.
os.register_at_fork(
    before=_collection_paused.acquire,
    after_in_parent=_collection_paused.release,
    after_in_child=_collection_paused.release,
)


@dataclass(frozen=True)
class SourceLine:
    """A line of the script.

    Attributes:
        key: identifies the line on all hosts, which may keep the script in different folders.
        where: text for messages: file, line, function and source.
    """

    key: str
    where: str


@contextmanager
def frame_of_thread(ident: int) -> Iterator[FrameType | None]:
    """Yields the innermost frame of another thread; None if the thread has ended. Walk the stack within the block only.

    Python 3.11 makes the object of an outer frame once `f_back` is read, and may collect garbage while it allocates it. If a
    finalizer then lets the other thread run on, the frame may be gone before its object is complete, and the process ends by
    SIGSEGV. So no garbage is collected meanwhile.
    """
    with _collection_paused:
        pauses = _COLLECTS_WHILE_IT_ALLOCATES and gc.isenabled()
        if pauses:
            gc.disable()
        try:
            yield sys._current_frames().get(ident)
        finally:
            if pauses:
                gc.enable()


def call_site(frame: FrameType | None = None) -> SourceLine:
    """Returns the line of the innermost frame of the user's code, which is neither Paceline's nor torch's.

    Args:
        frame: the frame at which to begin; by default the caller's.
    """
    for own in users_frames(frame or sys._getframe(1)):
        code = own.f_code
        line = line_of(own)
        source = linecache.getline(code.co_filename, line).strip()
        where = f"{code.co_filename}:{line} in {code.co_name}"
        return SourceLine(_key(own), f"{where}: {source}" if source else where)
    return SourceLine("", "an unknown place")


def waiting_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame of the operation that may wait for other ranks; None if the thread is in none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_MAY_WAIT):
            return frame
        if not file.startswith(_TORCH_CALLS) and not file.endswith(PASSED_THROUGH):
            return None
        frame = frame.f_back
    return None


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Returns whether a thread is inside a collective now, or waits for one.

    Hooks of a backward pass that run in compiled code, as those of DDP do, look like the backward pass itself. For these the
    answer is False.
    """
    waiting = waiting_frame(frame)
    if waiting is None:
        return False
    file = waiting.f_code.co_filename
    return file.startswith(_COLLECTIVES) or ".wait(" in linecache.getline(file, line_of(waiting))


def _key(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{line_of(frame)} in {code.co_name}"
