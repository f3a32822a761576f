"""`JsonlTracker` writes lines of JSON to `<folder>/<run>/metrics.jsonl`: for `tail -f`, `jq` and pandas. It needs no package.

    {"event": "start",  "time": 1700000000.0, "run": "digits", "config": {"lr": 0.001}}
    {"event": "log",    "time": 1700000001.2, "step": 10, "values": {"loss": 0.71}}
    {"event": "finish", "time": 1700000009.8, "status": "finished"}

Each line is written and flushed at once, so that nothing is lost if the run dies. If there is already a run of the same name,
its file is appended to, with another line of the event "start".
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from paceline.base.log import warn_once
from paceline.observe.trackers.tracker import not_open, refused


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
        settings = json.loads(json.dumps(dict(config), default=str))
        self._write("start", run=run, config=settings)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Writes one line.

        Raises:
            TrackerError: `tracker-value`, for a value that is not a number, a text, or a list or dict of these.
        """
        plain = {str(name): _plain(str(name), value) for name, value in values.items()}
        self._write("log", step=step, values=plain)

    def finish(self, status: str = "finished") -> None:
        """Writes how the run ended and closes the file."""
        self._write("finish", status=status)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, **fields: object) -> None:
        if self._file is None:
            raise not_open(self.name)
        line = {"event": event, "time": round(time.time(), 3), **fields}
        self._file.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()


def _plain(name: str, value: Any) -> Any:
    """Returns a value in types of JSON."""
    shape = getattr(value, "shape", None)  # a tensor, or a number or an array of NumPy
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
    raise refused("jsonl", name, value, "numbers, text and lists or dicts of these")


TRACKER = JsonlTracker
