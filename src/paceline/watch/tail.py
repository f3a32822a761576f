"""What the last lines of a run's files say: enough for a line of status, at the same small cost however long the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError
from paceline.watch.journal import Line, rank_file, read_header
from paceline.watch.records import record_of
from paceline.watch.view import RunView

_TAIL_BYTES = 32 << 10


def latest(folder: Path) -> dict[str, Any] | None:
    """A snapshot by the last lines of rank 0 and of the launchers; None where no run can be read there.

    What does not stand in these lines is missing in it: other ranks, older values.
    """
    try:
        view = RunView(read_header(folder))
        lines = _lines(folder / rank_file(0), "rank", 0)
        for number, path in enumerate(sorted(folder.glob("launcher-*.jsonl"))):
            lines += _lines(path, "launcher", number)
    except (ConfigError, OSError):
        return None
    for line in sorted(lines, key=lambda line: line.t):
        view.add(line)
    return view.snapshot(time.time())


def _lines(path: Path, role: str, number: int) -> list[Line]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return []  # its rank or launcher has not begun
    texts = data[: data.rfind(b"\n") + 1].splitlines()
    lines = []
    for text in texts[1:] if start else texts:
        try:
            t, record = record_of(text)
        except ValueError:
            continue  # a crash has cut it
        if record is not None:
            lines.append(Line(role, number, t, record))
    return lines
