"""Which run a word on the command line means: a folder, a name or a process number that `paceline ps` shows, or the newest."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.base.errors import ConfigError
from paceline.watch.journal import HEADER, watch_folder
from paceline.watch.registry import RegisteredRun, registered_runs

_MOST_NAMED = 5


def folder_of(run: str | None) -> Path:
    """The folder of the journal of a run.

    Args:
        run: a folder, or a name or process number of `paceline ps`; None for the newest run of this machine.

    Raises:
        ConfigError: `watch-no-run`, where there is no such run; `watch-permission`, where its folder may not be read.
    """
    runs = registered_runs()
    watched = _shown(runs)
    if run is None:
        if not watched:
            raise _no_run("no run of this machine is recorded.", runs)
        return _readable(Path(watched[0].watch))
    if Path(run).expanduser().is_dir():
        return _readable(_journal_below(Path(run).expanduser()))
    for entry in watched:  # the newest first: scripts run more than once
        if run in (entry.name, str(entry.pid), Path(entry.watch).parent.name):
            return _readable(Path(entry.watch))
    raise _no_run(
        f"there is no recorded run {run!r}: no such folder, and no name or process number of `paceline ps`.", runs
    )


def _shown(runs: Sequence[RegisteredRun]) -> list[RegisteredRun]:
    """Runs that were recorded, and whose folder nobody has removed."""
    return [entry for entry in runs if entry.watch and Path(entry.watch).is_dir()]


def _journal_below(folder: Path) -> Path:
    """The journal in a folder, or that of the newest run in it, where it is a folder of runs."""
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
    watched = _shown(runs)
    if not watched:
        others = len([entry for entry in runs if not entry.watch])
        runs_were = "run was" if others == 1 else "runs were"
        reason = "no run was started here by this user"
        if others:
            reason = f"{others} {runs_were} started here without --watch"
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
