"""`CsvTracker` writes numbers as a table to `<folder>/<run>/metrics.csv`: for spreadsheets, pandas and R. It needs no package.

    time,step,name,value
    1700000001.2,10,loss,0.71
    1700000001.2,10,train/accuracy,0.5

There is one row for each value: a new name may appear at any time, and a run that is continued appends rows. Rows are written
at once. `pandas.read_csv(path).pivot_table(index="step", columns="name", values="value")` has a column for each
name.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from paceline.observe.trackers.library import LibraryTracker
from paceline.observe.trackers.tracker import Status, flatten, refused

_HEADER = ("time", "step", "name", "value")


class CsvTracker(LibraryTracker):
    """Writes one row for each value. NaN and infinity are the words `nan`, `inf` and `-inf`, which readers of CSV know."""

    name = "csv"
    requires = ()
    package = "csv"

    def open_run(self, run: str) -> Any:
        """Opens `<folder>/<run>/metrics.csv` for appending."""
        path = self.folder / run / "metrics.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8", newline="")
        if file.tell() == 0:
            csv.writer(file).writerow(_HEADER)
            file.flush()
        return file

    def store_config(self, values: Mapping[str, Any]) -> None:
        """Writes the settings to `config.json` beside the table."""
        path = Path(self.native.name).with_name("config.json")
        path.write_text(json.dumps(dict(values), default=str, indent=1) + "\n", encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: object) -> None:
        """Writes a row for each number or text; the names within a dict are joined by `/`.

        Raises:
            TrackerError: `tracker-value`, for any other value; nothing of this call is written.
        """
        now = round(time.time(), 3)
        rows = [(now, step, name, _plain(name, value)) for name, value in flatten(values).items()]
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        # A single write, so that a process that is killed leaves no part of a call.
        self.native.write(text.getvalue())
        self.native.flush()

    def close_run(self, status: Status) -> None:
        """Closes the file. A table has no place for how the run ended."""
        self.native.close()


def _plain(name: str, value: SupportsFloat | str) -> str | int | float:
    """Returns the value of a cell."""
    if isinstance(value, str | int | float):
        return value
    try:
        return float(value)  # a number of numpy, or a tensor of one element
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises either of the last two
        raise refused("csv", name, value, "numbers, text and dicts of these") from None


TRACKER = CsvTracker
