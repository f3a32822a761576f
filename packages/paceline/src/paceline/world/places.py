"""Finds the line of the script from which the code of Paceline was called."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch

from paceline.base.ours import our_folders

if TYPE_CHECKING:
    from paceline.world.stacks.parse import Frame

TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = (*our_folders(), TORCH)
# Code of the standard library for decorators, `with` blocks and threads. It is neither the user's, nor does it wait.
PASSED_THROUGH = (
    "contextlib.py",
    "functools.py",
    f"{os.sep}threading.py",
    f"concurrent{os.sep}futures{os.sep}_base.py",
)


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
    return next(users_frames(sys._getframe(1)), None)


def users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if not _of_library(frame):
            yield frame
        frame = frame.f_back


def _of_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or file.endswith(PASSED_THROUGH)


def frames_of(innermost: FrameType | None) -> list[Frame]:
    """Returns the stack that begins with a frame, the innermost call first."""
    from paceline.world.stacks.parse import Frame  # only a report of a wait, or of a failure, needs it

    return [Frame(frame.f_code.co_filename, line_of(frame), frame.f_code.co_name) for frame in outwards(innermost)]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame, and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back
