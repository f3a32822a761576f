"""What the command tells the processes of a drill, what each of them writes down, and how the command reads that.

    {"folder": ..., "strike": "kill", "rank": 1, "step": 17, ...}     `DrillOrders`, in drill.json
    {"t": 1764444.5, "event": "step", "rank": 1, "pid": 4242, ...}    `DrillLine`, one for each event

A line is written by one call, before anything else happens: a process that is killed has written all lines before. This
module imports no torch, since the command reads it too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.base.followed_file import FollowedFile


@dataclass(frozen=True)
class DrillOrders:
    """What a process of a drill is told.

    Attributes:
        folder: where it writes its lines.
        checkpoints: where the checkpoints of the script go; "" where the script was told a folder itself.
        kind: of the script: "script" or "module".
        strike: the kind of `Fault` that strikes; "" for none.
        rank, step: where it strikes, and in which step: the one after so many.
    """

    folder: str
    checkpoints: str = ""
    kind: str = "script"
    strike: str = ""
    rank: int = 0
    step: int = -1

    def save(self) -> Path:
        """Writes the orders into the folder, and returns the file."""
        path = Path(self.folder) / "drill.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str) -> DrillOrders:
        """Reads what `save` has written."""
        return cls(**json.loads(Path(path).read_text()))


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
        self._files: dict[str, FollowedFile] = {}

    def poll(self) -> Sequence[DrillLine]:
        """Reads on, and returns the new lines."""
        new: list[DrillLine] = []
        for path in self._folder.glob("rank-*.lines"):
            new += map(_line_of, self._files.setdefault(path.name, FollowedFile(path)).read())
        new.sort(key=lambda line: line.t)
        self.lines += new
        # Files of other processes may have older lines than those that were read first.
        self.lines.sort(key=lambda line: line.t)
        return new


def _line_of(text: bytes) -> DrillLine:
    values = json.loads(text)
    t, event, rank, pid = (values.pop(name) for name in ("t", "event", "rank", "pid"))
    return DrillLine(t, event, rank, pid, values)
