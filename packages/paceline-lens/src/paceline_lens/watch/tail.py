"""`latest` makes a snapshot from the last lines of a run's files, for the status line. Its cost does not grow with the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError
from paceline_lens.watch.journal import JournalLine, rank_file, read_header
from paceline_lens.watch.records import record_of
from paceline_lens.watch.view import RunView

_TAIL_BYTES = 32 << 10


def latest(folder: Path) -> dict[str, Any] | None:
    """Returns a snapshot from the last lines of rank 0 and of the launchers; None if no run can be read.

    It lacks what is not in these lines, such as other ranks and older values.
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


def _lines(path: Path, role: str, number: int) -> list[JournalLine]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return []  # its rank or launcher has not begun
    texts = data[: data.rfind(b"\n") + 1].splitlines()
    if start > 0:
        texts = texts[1:]  # the first line is probably incomplete
    lines = []
    for text in texts:
        try:
            t, record = record_of(text)
        except ValueError:
            continue  # a crash has cut it
        if record is not None:
            lines.append(JournalLine(role, number, t, record))
    return lines
