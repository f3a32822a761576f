"""What each process of a drill writes down, one line for each event, and how the command reads it.

    {"t": 1764444.5, "event": "step", "rank": 1, "pid": 4242, "step": 17, ...}

A line is written by one call, before anything else happens: a process that is killed has written all lines before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DrillLine:
    """One event of one process.

    Attributes:
        t: seconds since the epoch.
        event: "ready" (it runs the script from here on), "preparing", "prepared", "loop" (the script asks for its first
            batch), "step", "saved", "strikes" (a fault comes next), "over" (the script has ended).
        rank, pid: the process.
        values: "ready" has `born`, when the process was started; "step" has `step` (optimizer steps so far, those before a
            resume included), `samples` (of all ranks, None where nobody knows) and `loss` (in hexadecimal; what this rank
            adds to the mean; None where the script calls `loss.backward()` itself); "loop" has `step`; "saved" has the
            fields of `SavedCheckpoint`.
    """

    t: float
    event: str
    rank: int
    pid: int
    values: dict[str, Any] = field(default_factory=dict)


class LineWriter:
    """Appends the lines of this process to its file.

    Args:
        folder: of the drill.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._pid = os.getpid()
        self._file = os.open(folder / f"rank-{rank}.lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, **values: Any) -> None:
        """Adds a line with the time of now; in a process that was forked from this one it does nothing."""
        if os.getpid() != self._pid:
            return
        line = {"t": time.time(), "event": event, "rank": self._rank, "pid": self._pid, **values}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class LineReader:
    """Follows the files of all processes of a drill.

    Args:
        folder: of the drill.

    Attributes:
        lines: all lines so far, in the order of their times.
    """

    def __init__(self, folder: Path) -> None:
        self.lines: list[DrillLine] = []
        self._folder = folder
        self._offsets: dict[str, int] = {}

    def poll(self) -> Sequence[DrillLine]:
        """Reads on, and returns the new lines."""
        new: list[DrillLine] = []
        for path in self._folder.glob("rank-*.lines"):
            offset = self._offsets.get(path.name, 0)
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path.name] = offset + len(whole)
            new += [_line_of(text) for text in whole.splitlines()]
        new.sort(key=lambda line: line.t)
        self.lines += new
        # Files of other processes may have older lines than those that were read first.
        self.lines.sort(key=lambda line: line.t)
        return new


def _line_of(text: bytes) -> DrillLine:
    values = json.loads(text)
    t, event, rank, pid = (values.pop(name) for name in ("t", "event", "rank", "pid"))
    return DrillLine(t, event, rank, pid, values)
