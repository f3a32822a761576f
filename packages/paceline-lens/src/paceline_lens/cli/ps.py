"""Lists the runs of this machine."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.base.files import expanded
from paceline.base.text_table import text_table
from paceline_lens.watch.registry import RegisteredRun, registered_runs

_RECENT_S = 24 * 3600.0
_MOST_ENDED = 10
_COLUMNS = ("PID", "NAME", "STATE", "PROCS", "STEP", "RATE", "STARTED", "FOLDER")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="?",
        metavar="NAME|FOLDER",
        help="list the runs of this name, or those started or kept below a folder (. for here)",
    )
    parser.add_argument("--all", action="store_true", help="list all known runs, not only those of the last day")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    entries = registered_runs()
    if args.runs is not None:
        entries = _of(args.runs, entries)
    if not args.all:
        entries = _recent(entries)
    rows = [_row(entry) for entry in entries]
    if args.json:
        print(json.dumps(rows, indent=2, allow_nan=False))
        return 0
    if not rows:
        when = "" if args.all else " in the last day"
        if args.runs is None:
            print(f"no run{when}; `paceline launch script.py` starts one")
        else:
            print(
                f"no run{when} of the name {args.runs!r} or below a folder {args.runs!r}; `paceline ps` lists all of them"
            )
        return 0
    print(*text_table([_COLUMNS, *map(_cells, rows)]), sep="\n")
    return 0


def _of(word: str, runs: list[RegisteredRun]) -> list[RegisteredRun]:
    """Returns the runs that have a name, or that were started or keep their journal in a folder or below it."""
    folder = expanded(word).resolve()
    of_word = []
    for entry in runs:
        folders = [Path(entry.directory)]
        if entry.watch:
            folders.append(Path(entry.watch))
        is_below = any(path.resolve().is_relative_to(folder) for path in folders)
        if entry.name == word or is_below:
            of_word.append(entry)
    return of_word


def _recent(runs: list[RegisteredRun]) -> list[RegisteredRun]:
    """Returns all runs that are still going on, and the last ones that have ended."""
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
