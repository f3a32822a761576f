"""A run folder that is followed: what comes later, processes that are stopped, a launcher that has gone; and its last lines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from synthetic_journal import write_synthetic

from paceline.base.errors import ConfigError
from paceline_lens.watch import following
from paceline_lens.watch.following import FollowedRun
from paceline_lens.watch.journal import JournalWriter, RunHeader, rank_file, write_header
from paceline_lens.watch.records import Hello, Tick
from paceline_lens.watch.tail import latest


def own_run(folder: Path, pid: int, ranks: int = 2) -> list[JournalWriter]:
    header = RunHeader(name="toy", host=socket.gethostname(), pid=pid, started=time.time(), procs=ranks)
    write_header(folder, header)
    writers = [JournalWriter(folder / rank_file(rank)) for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        writer.append(Hello(rank, host=socket.gethostname(), pid=pid))
        writer.append(Tick(4, steps=4, ms={"forward": 1000.0}))
    return writers


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_what_comes_later_is_read(tmp_path: Path) -> None:
    writers = own_run(tmp_path, os.getpid())
    followed = FollowedRun(tmp_path)
    assert followed.snapshot()["progress"]["step"] == 4
    writers[0].append(Tick(8, steps=4))
    assert followed.snapshot()["progress"]["step"] == 8
    assert [row["process"] for row in followed.snapshot()["ranks"]] == ["", ""]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says that a process is stopped")
def test_a_stopped_process_and_a_launcher_that_has_gone(
    tmp_path: Path, sleeper: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_run(tmp_path, sleeper.pid)
    followed = FollowedRun(tmp_path)
    followed.snapshot()
    monkeypatch.setattr(following, "_SILENT_S", -1.0)
    sleeper.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while followed.snapshot()["ranks"][0]["process"] != "stopped" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [row["process"] for row in followed.snapshot()["ranks"]] == ["stopped", "stopped"]
    assert followed.snapshot()["state"] == "running"
    sleeper.kill()
    sleeper.wait()
    snapshot = followed.snapshot()
    assert (snapshot["state"], snapshot["exit_code"]) == ("ended", None)


def test_a_run_of_another_host_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed = FollowedRun(write_synthetic(tmp_path, exit_code=None, started=time.time() - 600))
    monkeypatch.setattr(following, "_SILENT_S", -1.0)
    assert followed.snapshot()["state"] == "stuck"


def test_the_last_lines_are_enough_for_a_status(tmp_path: Path) -> None:
    folder = write_synthetic(tmp_path, seconds=400, names=30, exit_code=None)
    snapshot = latest(folder)
    assert snapshot is not None
    assert snapshot["progress"]["step"] == 1600
    assert snapshot["speed"]["mean"]["steps_per_s"] == pytest.approx(4.0, rel=0.01)
    assert latest(tmp_path / "none") is None


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        FollowedRun(tmp_path)
    assert caught.value.code == "watch-folder"
