"""Numbers as lines of JSON in `<folder>/<run>/metrics.jsonl`: for `tail -f`, `jq` and pandas; needs no package.

    {"event": "start",  "time": 1700000000.0, "run": "digits", "config": {"lr": 0.001}}
    {"event": "log",    "time": 1700000001.2, "step": 10, "values": {"loss": 0.71}}
    {"event": "finish", "time": 1700000009.8, "status": "finished"}

Each line is written and flushed at once, so that a run that dies keeps all that it said. A run of a name that is
there already is appended to: it begins with another `start`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from paceline.base.errors import TrackerError
from paceline.base.log import warn_once
from paceline.observe.trackers.tracker import not_open


class JsonlTracker:
    """Writes one line of JSON for each call of `log`."""

    name = "jsonl"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path: Path | None = None
        self._file: TextIO | None = None

    @property
    def native(self) -> TextIO | None:
        """The open file."""
        return self._file

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Opens `<folder>/<run>/metrics.jsonl` for appending; settings that JSON lacks are stored as their text."""
        self.path = self.folder / run / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._write({"event": "start", "run": run, "config": json.loads(json.dumps(dict(config), default=str))})

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Writes one line.

        Raises:
            TrackerError: `tracker-value`, for a value that is no number, text, or a list or dict of these.
        """
        self._write({"event": "log", "step": step, "values": {str(k): _plain(str(k), v) for k, v in values.items()}})

    def finish(self, status: str = "finished") -> None:
        """Writes how the run ended and closes the file."""
        self._write({"event": "finish", "status": status})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is None:
            raise not_open(self.name)
        line = {"event": record.pop("event"), "time": round(time.time(), 3)} | record
        self._file.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()


def _plain(name: str, value: Any) -> Any:
    """`value` as JSON has it."""
    shape = getattr(value, "shape", None)  # of a tensor or a numpy number
    if shape is not None and math.prod(shape) == 1:
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        warn_once("observe", f"{name} is {value}, which JSON lacks: it is written as null. See why it is not finite.")
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}/{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    raise TrackerError(
        "tracker-value",
        f"the jsonl tracker cannot write {name}, a {type(value).__name__}.",
        why="it writes numbers, text and lists or dicts of these"
        + (f"; {name} has shape {tuple(shape)}" if shape is not None else ""),
        fix=f"log a number instead, such as {name}.mean().item()",
    )


TRACKER = JsonlTracker
