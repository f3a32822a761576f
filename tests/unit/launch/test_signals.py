"""Signals that a launcher notes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

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
