"""The runs of this machine: which run, which have ended, and which are gone without a word."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from paceline.base.process_name import process_name
from paceline_lens.watch import registry
from paceline_lens.watch.registry import (
    RegisteredRun,
    mark_ended,
    mark_watched,
    register,
    registered_runs,
    registry_folder,
)


def own_run(started: float = 1.0) -> RegisteredRun:
    pid = os.getpid()
    return RegisteredRun("run", ["paceline"], "train.py", "/", socket.gethostname(), pid, process_name(pid), started)


def test_a_run_begins_and_ends(tmp_path: Path) -> None:
    path = register(own_run(), tmp_path / "runs")
    (run,) = registered_runs(tmp_path / "runs")
    assert (run.state, run.watch) == ("running", "")
    mark_watched(path, "/runs/1/watch")
    mark_ended(path, 2.0, 1)
    (run,) = registered_runs(tmp_path / "runs")
    assert (run.state, run.exit_code, run.watch) == ("ended", 1, "/runs/1/watch")


def test_states_of_launchers_that_said_nothing() -> None:
    own = own_run()
    assert RegisteredRun(**{**vars(own), "process": "an earlier process of that number"}).state == "lost"
    assert RegisteredRun(**{**vars(own), "process": ""}).state == "running"
    assert RegisteredRun(**{**vars(own), "process": "", "pid": 2**22 + 1}).state == "lost"
    assert RegisteredRun(**{**vars(own), "host": "another"}).state == "elsewhere"


def test_the_newest_come_first_and_bad_files_are_left_out(tmp_path: Path) -> None:
    for started in (1.0, 3.0, 2.0):
        register(own_run(started), tmp_path)
    (tmp_path / "1-bad.json").write_text("{")
    (tmp_path / "2-bad.json").write_text('{"pid": "x"}')
    whole = register(own_run(4.0), tmp_path).read_text()
    for path in tmp_path.glob("*.json"):
        if path.read_text() == whole:
            path.write_text(whole.replace("4.0", '"yesterday"'))
    assert [run.started for run in registered_runs(tmp_path)] == [3.0, 2.0, 1.0]
    assert registered_runs(tmp_path / "missing") == []


def test_files_of_old_runs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MOST_ENDED", 2)
    going = register(own_run(0.0), tmp_path)
    for started in range(1, 6):
        mark_ended(register(own_run(float(started)), tmp_path), 9.0, 0)
    assert [run.started for run in registered_runs(tmp_path)] == [5.0, 4.0, 3.0, 0.0]
    assert going.exists()


def test_the_folder_is_the_users() -> None:
    assert registry_folder({"XDG_STATE_HOME": "/state", "HOME": "/home/a"}) == Path("/state/paceline/runs")
    assert registry_folder({"HOME": "/home/a"}) == Path("/home/a/.local/state/paceline/runs")
