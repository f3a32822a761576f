"""The tools of `paceline.testing` that need no processes of their own."""

import os
import signal

import pytest

from paceline.base import env as environment
from paceline.testing import Fault, InjectedFault, worlds


def test_a_fault_strikes_at_its_rank_and_step_alone() -> None:
    fault = Fault("raise", rank=1, step=3)
    fault.at(3, rank=0)
    fault.at(2, rank=1)
    with pytest.raises(InjectedFault, match="rank 1 fails at step 3"):
        fault.at(3, rank=1)


def test_the_rank_is_read_from_the_environment() -> None:
    with environment.patched({"RANK": "2"}), pytest.raises(InjectedFault):
        Fault("raise", rank=2, step=0).at(0)
    with environment.patched({"RANK": None}), pytest.raises(InjectedFault):
        Fault("raise", rank=0, step=0).at(0)


def test_once(tmp_path) -> None:
    fault = Fault("raise", rank=0, step=0, once=tmp_path / "struck")
    with pytest.raises(InjectedFault):
        fault.at(0, rank=0)
    fault.at(0, rank=0)


def test_kinds(monkeypatch) -> None:
    seen: list = []
    monkeypatch.setattr(os, "kill", lambda pid, number: seen.append(number))
    monkeypatch.setattr(os, "_exit", lambda code: seen.append(code))
    monkeypatch.setattr("time.sleep", lambda seconds: seen.append(seconds))
    for kind in ("kill", "stop", "exit", "sleep"):
        Fault(kind, rank=0, step=0, seconds=0.5).at(0, rank=0)
    assert seen == [signal.SIGKILL, signal.SIGSTOP, 3, 0.5]


def test_worlds_over_hosts_that_are_not_full() -> None:
    found = [(one.rank, one.node, one.local_rank, one.local_size, one.nodes) for one in worlds(5, local_size=2)]
    assert found == [(0, 0, 0, 2, 3), (1, 0, 1, 2, 3), (2, 1, 0, 2, 3), (3, 1, 1, 2, 3), (4, 2, 0, 1, 3)]
