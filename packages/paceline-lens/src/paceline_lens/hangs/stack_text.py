"""Reads the stacks that faulthandler and py-spy write. Pure functions."""

from __future__ import annotations

import re

from paceline.world.stacks.parse import Frame, Stack

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.+)$')
_SPY_THREAD = re.compile(r"^Thread .*\((?:idle|active).*\)")
_SPY_FRAME = re.compile(r"^ {4}(?P<function>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$")


def threads_of(text: str) -> tuple[Stack, ...]:
    """Returns the threads of one dump of faulthandler, in its order: the main thread is the last."""
    return _threads(text, _THREAD, _FRAME)


def threads_of_py_spy(text: str) -> tuple[Stack, ...]:
    """Returns the threads of one `py-spy dump` without native frames. Its first one, the main thread, becomes the last."""
    return _threads(text, _SPY_THREAD, _SPY_FRAME)[::-1]


def _threads(text: str, begin: re.Pattern[str], call: re.Pattern[str]) -> tuple[Stack, ...]:
    """Returns the threads of a text in which each begins with a line of one pattern, and each call has a line of another."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        match = call.match(line)
        if begin.match(line):
            threads.append([])
        elif threads and match is not None:
            number = int(match["line"]) if match["line"].isdigit() else 0
            threads[-1].append(Frame(match["file"], number, match["function"]))
    return tuple(map(tuple, threads))
