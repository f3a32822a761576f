"""Where a thread is: finds the line of the script in its stack. Pure functions."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.base.ours import our_folders

_LAUNCHER = str(Path(__file__).parents[2] / "launch") + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch[/\\]")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_LOADERS = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]|[/\\]paceline[/\\]data[/\\]")
_NEXT_BATCH = ("__next__", "__iter__", "_batches")
# Functions that only wrap the one that the script has called.
_NO_NAMES = frozenset({"wrapper", "inner", "call", "decorate_context"})


@dataclass(frozen=True)
class Frame:
    """Holds one call on a stack.

    Attributes:
        file, line, function: where it is; the line is 0 if it is not known.
    """

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether it belongs to Paceline or torch."""
        return self.file.startswith(our_folders()) or _TORCH.search(self.file) is not None

    @property
    def is_launcher(self) -> bool:
        """Whether it belongs to the launcher, which calls the script in a forked process."""
        return self.file.startswith(_LAUNCHER)

    @property
    def is_users(self) -> bool:
        """Whether it is probably the user's code: it belongs to no installed package and not to Python."""
        return self.is_script and _PACKAGES.search(self.file) is None

    @property
    def is_script(self) -> bool:
        """Whether it belongs to the script, or to another library that runs it."""
        return not self.is_library and not self.is_stdlib

    @property
    def is_stdlib(self) -> bool:
        """Whether it belongs to Python's standard library."""
        is_package = _PACKAGES.search(self.file) is not None
        return self.file.startswith("<frozen ") or (self.file.startswith(_STDLIB) and not is_package)


Stack = tuple[Frame, ...]  # of one thread, the innermost call first


@dataclass(frozen=True)
class FramePosition:
    """Holds where a thread is. It is made on the thread's own host, and can be read on any other.

    Attributes:
        operation: the function of torch or Paceline that the line of the script has called; "" for none.
        file, line, function: the line of the script.
        source: what that line says; "" if the file cannot be read.
        path: all lines of the script on the stack, because a function may be called from several places.
    """

    operation: str
    file: str
    line: int
    function: str
    source: str = ""
    path: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The line of the script, with its source."""
        place = f"{shortened(self.file)}:{self.line} in {self.function}"
        return f"{place}: {self.source}" if self.source else place

    @property
    def text(self) -> str:
        """The operation and the line."""
        return f"in {self.operation} at {self.where}" if self.operation else f"at {self.where}"


@dataclass(frozen=True)
class RankPlace:
    """Holds where one rank is. It is made on the host of the rank, and can be read on any other.

    Attributes:
        rank: the rank.
        pid: its process number.
        place: where its main thread is; None if that is not known.
        state: the letter of the state of its process (`process_state`); "" if nobody has looked.
        still_s: seconds since its last sign of progress, or for which it has waited; 0 if it goes on.
        note: what else there is to say, such as why its place is not known.
        workers: the processes that it has started and that hold it up: the process number of each, and where it is.
        stacks: all its stacks, and those of the processes that it has started; "" if nobody has collected them.
        host: its host; "" in a report about a single host.
    """

    rank: int
    pid: int
    place: FramePosition | None = None
    state: str = ""
    still_s: float = 0.0
    note: str = ""
    workers: tuple[tuple[int, str], ...] = ()
    stacks: str = ""
    host: str = ""


def shortened(file: str) -> str:
    """Returns a path without the working directory, if it begins with that."""
    return file.removeprefix(os.getcwd() + os.sep)


def position(frames: Sequence[Frame]) -> FramePosition | None:
    """Returns where a thread is, by a line of the script; None for an empty stack.

    This is the innermost line of the user. If another library runs the script (a `Trainer`) and the user has no line on the
    stack, it is the innermost line that does not belong to Paceline, torch or Python.
    """
    if not frames:
        return None
    lines_of_user = [index for index, frame in enumerate(frames) if frame.is_users]
    lines_of_others = [index for index, frame in enumerate(frames) if frame.is_script]
    index = next(iter(lines_of_user or lines_of_others), 0)
    frame = frames[index]
    source = linecache.getline(frame.file, frame.line).strip()
    # A script may be in different folders on different hosts.
    path = tuple(f"{os.path.basename(own.file)}:{own.line}" for own in frames if own.is_script)
    return FramePosition(_operation(frames[:index]), frame.file, frame.line, frame.function, source, path)


def _operation(inner: Sequence[Frame]) -> str:
    """Returns what the line of the script has called, by the frames inside it: the outermost function with a public name."""
    library = [frame for frame in inner if frame.is_library]
    # `for batch in loader` has no call in the source: it calls `__next__`, or resumes a generator of these names.
    if library and _LOADERS.search(library[-1].file):
        name = library[-1].function
        return "DataLoader.__next__" if name in _NEXT_BATCH else f"the loader's {name}"
    for frame in reversed(library):
        if not frame.function.startswith(("_", "<")) and frame.function not in _NO_NAMES:
            return frame.function
    return library[-1].function if library else ""
