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
from typing import TYPE_CHECKING

import torch

from paceline.base.ours import our_folders

if TYPE_CHECKING:
    from paceline.world.stacks.parse import Frame

_PACELINE = str(Path(str(sys.modules["paceline"].__file__)).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = (*our_folders(), _TORCH)
# Code of the standard library for decorators, `with` blocks and threads. It is neither the user's, nor does it wait.
_PASSED_THROUGH = (
    "contextlib.py",
    "functools.py",
    f"{os.sep}threading.py",
    f"concurrent{os.sep}futures{os.sep}_base.py",
)
# The code that may wait for other ranks. The loaders of `paceline/data` wait too, but for samples.
_MAY_WAIT = (
    *(f"{_PACELINE}{package}{os.sep}" for package in ("world", "parallel", "checkpoint")),
    f"{_TORCH}distributed{os.sep}",
    f"{_TORCH}nn{os.sep}parallel{os.sep}distributed.py",
    f"{_TORCH}autograd{os.sep}graph.py",  # calls the engine, which runs the hooks that reduce gradients
)
_TORCH_CALLS = (f"{_TORCH}_ops.py", f"{_TORCH}utils{os.sep}")  # frames between an operator and its caller
# Code that blocks until other ranks have arrived. In other files a thread waits if its line calls `wait` of a work, which is
# compiled code and has no frame of its own.
_COLLECTIVES = (
    f"{_TORCH}distributed{os.sep}distributed_c10d.py",
    f"{_TORCH}distributed{os.sep}_functional_collectives.py",
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
    for own in _users_frames(frame or sys._getframe(1)):
        code = own.f_code
        line = line_of(own)
        source = linecache.getline(code.co_filename, line).strip()
        where = f"{code.co_filename}:{line} in {code.co_name}"
        return SourceLine(_key(own), f"{where}: {source}" if source else where)
    return SourceLine("", "an unknown place")


def line_of(frame: FrameType) -> int:
    """Returns the line of the script at which a frame is.

    Python adds instructions that belong to no line, such as those at the end of `except ... as error`. The frame of another
    thread may be at one of them. Then the line before that instruction is returned.
    """
    line: int | None = frame.f_lineno
    if line is not None:
        return line
    line = frame.f_code.co_firstlineno
    for start, _, own_line in frame.f_code.co_lines():
        if own_line is not None and start <= frame.f_lasti:
            line = own_line
    return line


def user_frame() -> FrameType | None:
    """Returns the innermost frame above the caller that belongs to the user's code; None if there is none."""
    return next(_users_frames(sys._getframe(1)), None)


def waiting_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame of the operation that may wait for other ranks; None if the thread is in none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_MAY_WAIT):
            return frame
        if not file.startswith(_TORCH_CALLS) and not file.endswith(_PASSED_THROUGH):
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


def _users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not _of_library(frame):
            yield frame
        frame = frame.f_back


def _of_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or file.endswith(_PASSED_THROUGH)


def _key(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{line_of(frame)} in {code.co_name}"


def frames_of(innermost: FrameType | None) -> list[Frame]:
    """Returns the stack that begins with a frame, the innermost call first."""
    from paceline.world.stacks.parse import Frame  # only a report of a wait, or of a failure, needs it

    return [Frame(frame.f_code.co_filename, line_of(frame), frame.f_code.co_name) for frame in outwards(innermost)]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame, and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
