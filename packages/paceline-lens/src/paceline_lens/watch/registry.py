"""Lists the runs of this machine for `paceline ps`: the launcher of each run writes a small file.

    ~/.local/state/paceline/runs/4242-1a2b3c4d.json      (below XDG_STATE_HOME where that is set)

A launcher writes its end into its file. One that was killed cannot: so its process is looked for by its number and the time of
its start, since the system uses numbers again. Of runs that have ended, the files of the last hundred are kept.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from paceline.base import env as environment
from paceline.base.files import replace_text
from paceline.base.json_fields import read_file
from paceline.base.process_name import process_name
from paceline.config.places import user_folder
from paceline_lens.processes import process_exists

_MOST_ENDED = 100


@dataclass(frozen=True)
class RegisteredRun:
    """One launcher of this machine, and what it runs.

    Attributes:
        name: of the run.
        command: the words that were typed.
        script: the file, module or program that each process runs.
        directory: where it was started.
        host, pid: of the launcher.
        process: a unique name of the launcher's process, from its number and start; "" if the system does not tell.
        started: seconds since the epoch.
        procs: processes of this host.
        nodes, node: hosts of the run, and the number of this one.
        watch: the folder of its journal; "" if it is not watched.
        ended: when the launcher ended; None before.
        exit_code: the exit code of the launcher; None before.
    """

    name: str = ""
    command: list[str] = field(default_factory=list)
    script: str = ""
    directory: str = ""
    host: str = ""
    pid: int = 0
    process: str = ""
    started: float = 0.0
    procs: int = 1
    nodes: int = 1
    node: int = 0
    watch: str = ""
    ended: float | None = None
    exit_code: int | None = None

    @property
    def state(self) -> str:
        """ "running", "ended", "lost" (it was killed and wrote no end) or "elsewhere" (another host shares the folder)."""
        if self.ended is not None:
            return "ended"
        if self.host != socket.gethostname():
            return "elsewhere"
        if self.process:
            return "running" if process_name(self.pid) == self.process else "lost"
        return "running" if process_exists(self.pid) else "lost"


def registry_folder(env: Mapping[str, str] | None = None) -> Path:
    """Returns the user's folder for the files of runs."""
    env = environment.snapshot() if env is None else env
    return user_folder(env, "XDG_STATE_HOME", ".local/state") / "paceline" / "runs"


def register(run: RegisteredRun, folder: Path | None = None) -> Path:
    """Writes the file of a run that begins, and removes those of the runs that ended first, where there are many.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder = registry_folder() if folder is None else folder
    path = folder / f"{run.pid}-{os.urandom(4).hex()}.json"
    _write(path, run)
    _remove_oldest(folder)
    return path


def mark_ended(path: Path, ended: float, exit_code: int) -> None:
    """Says in a run's file that its launcher ends.

    Raises:
        OSError: the file cannot be written.
    """
    run = _read(path)
    if run is not None:
        _write(path, replace(run, ended=ended, exit_code=exit_code))


def mark_watched(path: Path, watch: str) -> None:
    """Says in a run's file where its journal is.

    Raises:
        OSError: the file cannot be written.
    """
    run = _read(path)
    if run is not None:
        _write(path, replace(run, watch=watch))


def registered_runs(folder: Path | None = None) -> list[RegisteredRun]:
    """All runs that have a file, those that began last first. Files that cannot be read are left out."""
    if folder is None:
        folder = registry_folder()
    runs: list[RegisteredRun] = []
    for path in folder.glob("*.json"):
        run = _read(path)
        if run is not None:
            runs.append(run)
    runs.sort(key=lambda run: run.started, reverse=True)
    return runs


def _write(path: Path, run: RegisteredRun) -> None:
    replace_text(path, json.dumps(asdict(run)) + "\n")


def _read(path: Path) -> RegisteredRun | None:
    try:
        run: RegisteredRun = read_file(RegisteredRun, json.loads(path.read_text(encoding="utf-8")), path.name)
    except (OSError, ValueError):
        return None  # another command has removed it, or a crash of the system has damaged it
    return run


def _remove_oldest(folder: Path) -> None:
    """Keeps the files of the last runs that have ended, or were lost."""
    paths = list(folder.glob("*.json"))
    # All files are read only now and then: at each start it would take 10 ms, and more where the home folder is on a network.
    if len(paths) < 2 * _MOST_ENDED:
        return
    over: list[tuple[float, Path]] = []
    for path in paths:
        run = _read(path)
        if run is not None and run.state in ("ended", "lost"):
            over.append((run.started, path))
    for _, path in sorted(over, reverse=True)[_MOST_ENDED:]:
        path.unlink(missing_ok=True)
