"""Lists the runs of this machine."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.base.text_table import text_table

_RECENT_S = 24 * 3600.0
_MOST_ENDED = 10
_COLUMNS = ("PID", "NAME", "STATE", "PROCS", "STEP", "RATE", "STARTED", "FOLDER")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="list all known runs, not only those of the last day")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    rows = [_row(entry) for entry in _chosen(args.all)]
    if args.json:
        print(json.dumps(rows, indent=2, allow_nan=False))
        return 0
    if not rows:
        when = "" if args.all else " in the last day"
        print(f"no run{when}; `paceline launch script.py` starts one")
        return 0
    print(*text_table([_COLUMNS, *map(_cells, rows)]), sep="\n")
    return 0


def _chosen(everything: bool) -> list[Any]:
    """Returns all runs that are still going on, and the last ones that have ended."""
    from paceline.watch.registry import registered_runs

    runs = registered_runs()
    if everything:
        return runs
    running = []
    recent = []
    for entry in runs:
        if entry.state == "running":
            running.append(entry)
        elif entry.started > time.time() - _RECENT_S:
            recent.append(entry)
    return [*running, *recent[:_MOST_ENDED]]


def _row(entry: Any) -> dict[str, Any]:
    """Returns the data of a run that `--json` prints."""
    from paceline_lens.watch.tail import latest

    row = {**asdict(entry), "state": entry.state}
    row |= {"step": None, "total": None, "steps_per_s": None}
    if not entry.watch:
        return row
    snapshot = latest(Path(entry.watch))
    if snapshot is None:
        return row
    row |= {"step": snapshot["progress"]["step"], "total": snapshot["progress"]["total"]}
    if entry.state == "running" and snapshot["state"] == "stuck":
        row["state"] = "stuck"
    elif entry.state == "running":
        row["steps_per_s"] = snapshot["speed"]["recent"]["steps_per_s"]
    return row


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    state = row["state"]
    if state == "ended":
        state = f"ended ({row['exit_code']})"
    step = "" if row["step"] is None else f"{row['step']:,}"
    if row["total"]:
        step += f"/{row['total']:,}"
    rate = "" if row["steps_per_s"] is None else f"{row['steps_per_s']:.3g} steps/s"
    procs = str(row["procs"])
    if row["nodes"] > 1:
        procs += f" x {row['nodes']}"
    folder = row["watch"] or f"{row['directory']} (not watched)"
    if row["watch"] and row["step"] is None:
        folder += " (removed)" if not Path(folder).is_dir() else " (cannot be read)"
    return (str(row["pid"]), row["name"], state, procs, step, rate, _moment(row["started"]), folder)


def _moment(started: float) -> str:
    """Returns the time of day for a moment of today, otherwise the date."""
    then = time.localtime(started)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d", then)
