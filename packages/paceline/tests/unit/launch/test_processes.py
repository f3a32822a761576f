"""How long a process has been stopped or failing: by a clock that no suspended machine and no clock change moves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.base.exits import PREEMPTED
from paceline.launch.job import Job, Target
from paceline.launch.launcher import Process, Rendered
from paceline.launch.launchers.local import LocalHandle
from paceline.launch.processes import spawn
from paceline.launch.processes.failure import end_frozen, stuck
from paceline.launch.processes.spawn import Worker
from paceline.torch_internals import forks

HOUR_S = 3600.0


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Worker]:
    running = subprocess.Popen(["sleep", "60"], process_group=0)
    yield Worker(Process(0, 0, {}), running.pid, tmp_path / "report", True, running)
    running.kill()
    running.wait()


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a clock forward: by default the time of day, which a suspended machine catches up with at once."""

    def put_forward(clock: str = "time", by_s: float = HOUR_S) -> None:
        right = getattr(time, clock)
        monkeypatch.setattr(time, clock, lambda: right() + by_s)

    return put_forward


def test_a_stopped_process_is_killed_for_time_that_has_passed_alone(child: Worker, jump: Callable[..., None]) -> None:
    child.send(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not child.frozen_s() and time.monotonic() < deadline:
        time.sleep(0.01)
    jump()
    end_frozen([child], 600.0)
    assert child.poll() is None and not child.report.exists()
    assert 0 < child.frozen_s() < 60
    jump("monotonic", 601)
    end_frozen([child], 600.0)
    assert child.popen is not None and child.popen.wait(10) == -signal.SIGKILL
    assert child.report_text() == "stopped by a signal for more than 600 s, and therefore killed"


def test_a_process_that_goes_on_is_not_stopped(child: Worker, jump: Callable[..., None]) -> None:
    child.send(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not child.frozen_s() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send(signal.SIGCONT)
    while child.frozen_s() and time.monotonic() < deadline:
        time.sleep(0.01)
    jump("monotonic", 601)
    assert child.frozen_s() == 0.0


def test_a_failing_process_has_its_seconds_to_end(child: Worker, jump: Callable[..., None]) -> None:
    child.report.write_text("ValueError: the cause")
    assert not stuck(child)
    jump()
    assert not stuck(child)
    jump("monotonic", 6)
    assert stuck(child)


def test_processes_have_their_seconds_after_others_have_saved(tmp_path: Path, jump: Callable[..., None]) -> None:
    job = Job(Target("script", "train.py"), 2, grace_s=30)
    handle = LocalHandle(Rendered(job, ()))
    ended = subprocess.Popen([sys.executable, "-S", "-c", f"import os; os._exit({PREEMPTED})"])
    handle.workers = [Worker(Process(0, 0, {}), ended.pid, tmp_path / "report", False, ended)]
    ended.wait()
    assert handle.workers[0].poll() == PREEMPTED
    jump()
    assert not handle._left_behind()
    jump("monotonic", 31)
    assert handle._left_behind()
    for each in (handle.signals.read, handle.signals._write):
        os.close(each)


def test_a_forked_worker_uses_torchs_threads_before_its_script_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    renewed: list[int | None] = []
    monkeypatch.setattr(forks, "renew_threads", renewed.append)
    monkeypatch.setattr(spawn, "kill_with_parent", lambda pid: None)
    monkeypatch.setattr("numpy.random.seed", lambda: None)
    # Without the variable the user has set it for the launcher too, and torch knows it.
    for variables in ({}, {"OMP_NUM_THREADS": "3"}):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        process = Process(0, 0, variables)
        spawn.enter_forked_worker(process, tmp_path / "report", {}, os.getpid(), leads=False, shares_output=False)
    assert renewed == [None, 3]
