"""Finds the run that a word on the command line means: a folder, a name or a process number of `paceline ps`, or the newest."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.base.errors import ConfigError
from paceline.base.files import expanded
from paceline_lens.watch.journal import HEADER, watch_folder
from paceline_lens.watch.registry import RegisteredRun, registered_runs

_MOST_NAMED = 5


def folder_of(run: str | None) -> Path:
    """Returns the folder of the journal of a run.

    Args:
        run: a folder, or a name or process number of `paceline ps`; None for the newest run of this machine.

    Raises:
        ConfigError: `watch-no-run`, if there is no such run; `watch-permission`, if its folder may not be read.
    """
    runs = registered_runs()
    watched = _watched(runs)
    if run is None:
        if not watched:
            raise _no_run("no run of this machine is recorded.", runs)
        return _readable(Path(watched[0].watch))
    folder = expanded(run)
    if folder.is_dir():
        return _readable(_journal_below(folder))
    # The newest run is the first: most names have several runs.
    for entry in watched:
        if run in (entry.name, str(entry.pid), Path(entry.watch).parent.name):
            return _readable(Path(entry.watch))
    raise _no_run(
        f"there is no recorded run {run!r}: no such folder, and no name or process number of `paceline ps`.", runs
    )


def _watched(runs: Sequence[RegisteredRun]) -> list[RegisteredRun]:
    """Returns the runs that were watched, and whose folder still exists."""
    return [entry for entry in runs if entry.watch and Path(entry.watch).is_dir()]


def _journal_below(folder: Path) -> Path:
    """Returns the journal in a folder; if it is a folder of runs, the journal of the newest one."""
    inside = watch_folder(folder)
    if (inside / HEADER).exists():
        return inside
    journals = [path.parent for path in (*folder.glob(f"*/{HEADER}"), *folder.glob(f"*/watch/{HEADER}"))]
    return max(journals, key=lambda path: (path / HEADER).stat().st_mtime, default=inside)


def _readable(folder: Path) -> Path:
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(
            "watch-permission",
            f"the folder of the run may not be read: {folder}",
            why=f"it belongs to another user (uid {folder.stat().st_uid}), and this is uid {os.getuid()}",
            fix=f"ask its owner for `chmod -R a+rX {folder}`",
        )
    return folder


def _no_run(what: str, runs: Sequence[RegisteredRun]) -> ConfigError:
    watched = _watched(runs)
    if not watched:
        unwatched = sum(entry.watch == "" for entry in runs)
        reason = "no run was started here by this user"
        if unwatched:
            runs_were = "run was" if unwatched == 1 else "runs were"
            reason = f"{unwatched} {runs_were} started here without --watch"
        fix = "start a run with `paceline launch --watch train.py`, or name the folder of one: `paceline watch FOLDER`"
        return ConfigError("watch-no-run", what, reason, fix)
    why = []
    for entry in watched[:_MOST_NAMED]:
        why.append(f"{entry.name} (process {entry.pid}, {entry.state}, {_ago(entry.started)}): {entry.watch}")
    if len(watched) > _MOST_NAMED:
        why.append(f"and {len(watched) - _MOST_NAMED} older ones")
    return ConfigError("watch-no-run", what, why, f"paceline watch {watched[0].watch}")


def _ago(moment: float) -> str:
    minutes = max(0.0, time.time() - moment) / 60
    if minutes < 60:
        return f"{minutes:.0f} min ago"
    return f"{minutes / 60:.0f} h ago" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days ago"
