"""Signals that a launcher notes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.job import Job, Target
from paceline.launch.launchers import local
from paceline.launch.processes import signals
from paceline.launch.processes.signals import Signals


@pytest.fixture
def noted() -> Iterator[Signals]:
    noted = Signals(lambda number: None)
    noted.enter()
    yield noted
    noted.leave()


def test_one_request_may_come_as_several_signals(noted: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system signals each process, and the first one passes its signal on to the second."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert noted.take_new() == [signal.SIGTERM]
    monkeypatch.setattr(signals, "_SAME_REQUEST_S", 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert noted.take_new() == [signal.SIGTERM]


def test_a_second_ctrl_c_is_a_second_request(noted: Signals) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert noted.take_new() == [signal.SIGINT, signal.SIGINT]


def test_ctrl_c_during_imports_is_noted_also_where_an_import_swallows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def swallow(*_: object, **__: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("Ctrl-C interrupts imports")

    monkeypatch.setattr(local, "import_for_scripts", swallow)
    started = tmp_path / "started"
    (tmp_path / "train.py").write_text(f"open({str(started)!r}, 'w')")
    job = Job(Target("script", str(tmp_path / "train.py")), 2)
    assert local.LAUNCHER.submit(local.LAUNCHER.render(job)).wait().exit_code == 128 + signal.SIGINT
    assert not started.exists()
