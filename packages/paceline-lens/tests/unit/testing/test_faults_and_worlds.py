"""The tools of `paceline.testing` that need no processes of their own."""

import os
import signal

import pytest
import torch

from paceline.base import env as environment
from paceline.base.errors import CheckpointError
from paceline.checkpoint import Checkpointer, TrainState, verify
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store.local import LocalStore
from paceline.testing import Fault, InjectedFault, arm, damage, worlds


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


def test_faults_within_a_save(tmp_path):
    """Each place is passed once a save, in this order; what was saved before is never lost."""
    model = torch.nn.Linear(2, 1)
    state, saver = TrainState(models={"model": model}), Checkpointer(keep=Keep(last=1))
    path = str(tmp_path / "checkpoint_0")
    saver.save(path, state)
    for number, place in enumerate(("stage", "shard", "manifest", "publish", "published", "prune"), 1):
        disarm = arm(Fault("raise", rank=0, step=0, place=place))
        with environment.patched({"RANK": None}), pytest.raises((CheckpointError, InjectedFault)):
            saver.save(str(tmp_path / f"checkpoint_{number}"), state)
        disarm()
        assert latest(tmp_path) is not None, place
    for kind, code in (("disk-full", "checkpoint-disk-full"), ("forbidden", "checkpoint-not-writable")):
        disarm = arm(Fault(kind, rank=0, step=0, place="shard"))
        with environment.patched({"RANK": None}), pytest.raises(CheckpointError) as caught:
            saver.save(str(tmp_path / "checkpoint_9"), state)
        disarm()
        assert caught.value.code == code
    disarm = arm(Fault("raise", rank=0, step=1, place="load"))
    with environment.patched({"RANK": None}), pytest.raises(CheckpointError, match="InjectedFault"):
        saver.load(latest(tmp_path), state)  # verified first: the second reading is the load's
    disarm()


@pytest.mark.parametrize(
    ("how", "why"), [("flip", "checksum"), ("cut", "bytes and has"), ("remove", "missing"), ("cut-manifest", "")]
)
def test_damage(tmp_path, how, why):
    path = str(tmp_path / "checkpoint_0")
    Checkpointer().save(path, TrainState(models={"model": torch.nn.Linear(2, 1)}))
    name = damage(path, how)
    assert name == ("manifest.json" if how == "cut-manifest" else "__0_0.distcp")
    if why:
        assert why in verify(path, LocalStore())[0].why
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        latest(tmp_path)


def test_faults_that_cannot_be():
    with pytest.raises(ValueError, match="cannot come later"):
        Fault("raise", rank=0, step=0, after_s=1)
    with pytest.raises(ValueError, match="say a place"):
        Fault("disk-full", rank=0, step=0)


def latest(folder):
    return Checkpointer().latest(folder)
