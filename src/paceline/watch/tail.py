"""What the last lines of a run's files say: enough for a line of status, at the same small cost however long the run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError
from paceline.watch.journal import Line, launcher_file, rank_file, read_header
from paceline.watch.records import record_of
from paceline.watch.view import RunView

_TAIL_BYTES = 32 << 10


def latest(folder: Path) -> dict[str, Any] | None:
    """A snapshot by the last lines of rank 0 and of the first host's launcher; None where no run can be read there.

    What does not stand in these lines is missing in it: other ranks, older values.
    """
    try:
        view = RunView(read_header(folder))
        files = [*_lines(folder / launcher_file(0), "launcher"), *_lines(folder / rank_file(0), "rank")]
    except (ConfigError, OSError):
        return None
    for line in sorted(files, key=lambda line: line.t):
        view.add(line)
    return view.snapshot(time.time())


def _lines(path: Path, role: str) -> list[Line]:
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
            lines.append(Line(role, 0, t, record))
    return lines
