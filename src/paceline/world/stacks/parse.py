"""Stacks as text, read back: what faulthandler and py-spy write, and where the script is in it. Pure functions."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')
_SPY_THREAD = re.compile(r"^Thread .*\((?:idle|active).*\)")
_SPY_FRAME = re.compile(r"^ {4}(?P<function>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$")

_PACELINE = str(Path(__file__).parents[2]) + os.sep
_LAUNCHER = f"{_PACELINE}launch{os.sep}"
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = re.compile(r"[/\\](?:site|dist)-packages[/\\]torch[/\\]")
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_LOADERS = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]|[/\\]paceline[/\\]data[/\\]")
# Names of functions around the one that was called.
_NO_NAMES = frozenset({"wrapper", "inner", "call", "decorate_context"})


@dataclass(frozen=True)
class Frame:
    """One call on a stack.

    Attributes:
        file, line, function: where it is; the line is 0 where it is not known.
    """

    file: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether it is of Paceline or torch."""
        return self.file.startswith(_PACELINE) or _TORCH.search(self.file) is not None

    @property
    def is_launcher(self) -> bool:
        """Whether it is of the launcher, which calls the script in a forked process."""
        return self.file.startswith(_LAUNCHER)

    @property
    def is_users(self) -> bool:
        """Whether it is probably the user's own: of no package that was installed, nor of Python."""
        return self.is_script and _PACKAGES.search(self.file) is None

    @property
    def is_script(self) -> bool:
        """Whether it is of the script, or of another library that runs it."""
        return not self.is_library and not self.is_stdlib

    @property
    def is_stdlib(self) -> bool:
        """Whether it is of Python's own library."""
        is_package = _PACKAGES.search(self.file) is not None
        return self.file.startswith("<frozen ") or (self.file.startswith(_STDLIB) and not is_package)


@dataclass(frozen=True)
class Thread:
    """The stack of one thread, the innermost call first."""

    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Position:
    """Where a thread is.

    Attributes:
        operation: the function of torch or Paceline that the script's line has called; "" where it is in none.
        file, line, function: the script's line.
    """

    operation: str
    file: str
    line: int
    function: str

    @property
    def where(self) -> str:
        """The script's line for people, with its source where the file is at hand."""
        source = linecache.getline(self.file, self.line).strip()
        place = f"{shortened(self.file)}:{self.line} in {self.function}"
        return f"{place}: {source}" if source else place

    @property
    def text(self) -> str:
        """Operation and line."""
        return f"in {self.operation} at {self.where}" if self.operation else f"at {self.where}"


def shortened(file: str) -> str:
    """A path, without the working directory that it begins with."""
    return file.removeprefix(os.getcwd() + os.sep)


# Beginnings of paths that differ from host to host, and the words that stand for them on the way.
_PORTABLE = {_PACELINE: "<paceline>/", _STDLIB: "<stdlib>/"}


def portable(file: str) -> str:
    """A path for another host, on which Python and Paceline may be installed elsewhere."""
    for beginning, word in _PORTABLE.items():
        if file.startswith(beginning):
            return word + file.removeprefix(beginning)
    return file


def at_home(file: str) -> str:
    """The path of this host for one that `portable` gave on another."""
    for beginning, word in _PORTABLE.items():
        if file.startswith(word):
            return beginning + file.removeprefix(word)
    return file


def threads_of(text: str) -> tuple[Thread, ...]:
    """The threads of one dump of faulthandler, in its order: the main thread is the last."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            number = int(match["line"]) if match["line"].isdigit() else 0
            threads[-1].append(Frame(match["file"], number, match["function"]))
    return tuple(Thread(tuple(frames)) for frames in threads)


def threads_of_py_spy(text: str) -> tuple[Thread, ...]:
    """The threads of one `py-spy dump` without native frames: its first, the main thread, becomes the last."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _SPY_THREAD.match(line):
            threads.append([])
        elif threads and (match := _SPY_FRAME.match(line)):
            threads[-1].append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(Thread(tuple(frames)) for frames in reversed(threads))


def position(frames: Sequence[Frame]) -> Position | None:
    """Where a thread is, in the words of the script; None of an empty stack.

    The innermost line of the user's own counts; in a script that another library runs (a `Trainer`), where the user has no
    line on the stack, the innermost that is neither Paceline's, torch's nor Python's.
    """
    if not frames:
        return None
    of_users = [index for index, frame in enumerate(frames) if frame.is_users]
    of_others = [index for index, frame in enumerate(frames) if frame.is_script]
    index = next(iter(of_users or of_others), 0)
    frame = frames[index]
    return Position(_operation(frames[:index]), frame.file, frame.line, frame.function)


def _operation(inner: Sequence[Frame]) -> str:
    """What the script's line has called, of the frames inside of it: the outermost function with a public name."""
    library = [frame for frame in inner if frame.is_library]
    # Whoever takes a batch has written no call: `for batch in loader` calls `__next__`, or goes on with a generator.
    if library and _LOADERS.search(library[-1].file):
        name = library[-1].function
        return "DataLoader.__next__" if name in ("__next__", "__iter__") else f"the loader's {name}"
    for frame in reversed(library):
        if not frame.function.startswith(("_", "<")) and frame.function not in _NO_NAMES:
            return frame.function
    return library[-1].function if library else ""
