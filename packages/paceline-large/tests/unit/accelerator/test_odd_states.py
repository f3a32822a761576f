"""States saved and loaded at odd moments: nothing is lost, nothing is mixed up, and what was saved last counts."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.base.errors import CheckpointError
from paceline.base.exits import PREEMPTED
from paceline.checkpoint import Checkpointer, TrainState
from paceline.checkpoint.format import manifest
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.search import CheckpointSearch
from paceline.checkpoint.store.local import LocalStore
from paceline.testing import run_ranks
from paceline_large.optim.local_sgd import LocalSGD


class Number:
    """A registered object."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Other(Number):
    pass


@pytest.fixture
def begin():
    begun = []

    def run(folder, **options):
        accelerator = Accelerator(cpu=True, project_dir=str(folder), **options)
        begun.append(accelerator)
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        loader = DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=2)
        parts = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        return accelerator, *parts

    yield run
    for accelerator in begun:
        accelerator.end_training()


def asked_to_end(accelerator, model, optimizer, loader, save_at=-1):
    accelerator.resume()
    with pytest.raises(SystemExit) as ended:
        for number, (batch,) in enumerate(loader):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if number == save_at:
                accelerator.save_state(background=True)
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == PREEMPTED


def test_a_run_that_keeps_the_best_saves_when_it_is_asked_to_end(begin, tmp_path):
    """The metric is not known there; it must not cost the checkpoint."""
    asked_to_end(*begin(tmp_path, keep=Keep(best="loss")))
    assert Manifest.find(LocalStore(), str(tmp_path / "checkpoints/checkpoint_0")).step == 3


def test_a_failed_save_before_does_not_cost_the_last_one(begin, tmp_path, monkeypatch, caplog):
    real, failed = LocalStore.publish, []

    def publish(self, *args, **named):
        if not failed:
            failed.append(True)
            raise OSError(28, "No space left on device")
        return real(self, *args, **named)

    monkeypatch.setattr(LocalStore, "publish", publish)
    asked_to_end(*begin(tmp_path), save_at=1)
    assert Manifest.find(LocalStore(), str(tmp_path / "checkpoints/checkpoint_1")).step == 3
    assert "checkpoint-disk-full" in caplog.text


def test_a_named_checkpoint_among_automatic_ones(begin, tmp_path):
    accelerator, *_ = begin(tmp_path)
    accelerator.save_state(tmp_path / "checkpoints/best")
    accelerator.load_state()
    assert accelerator.save_state().endswith("checkpoint_0")


def test_hooks_of_a_load_come_after_the_save_before_it(begin, tmp_path, monkeypatch):
    accelerator, *_ = begin(tmp_path)
    real, seen = LocalStore.publish, []
    monkeypatch.setattr(LocalStore, "publish", lambda *args, **named: (time.sleep(0.3), real(*args, **named)))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(os.path.exists(folder)))
    accelerator.save_state(tmp_path / "x", background=True)
    accelerator.load_state(tmp_path / "x")
    assert seen == [True]


def test_registered_objects_in_another_order(begin, tmp_path):
    accelerator, *_ = begin(tmp_path)
    accelerator.register_for_checkpointing(Number(1), Other(2))
    accelerator.save_state(tmp_path / "x")
    again, *_ = begin(tmp_path)
    one, two = Number(), Other()
    again.register_for_checkpointing(two, one)
    with pytest.raises(CheckpointError, match="another order") as error:
        again.load_state(tmp_path / "x")
    assert error.value.code == "checkpoint-owners" and (one.value, two.value) == (0, 0)


def test_between_two_averages_one_rank_is_saved(tmp_path):
    """Replicas differ there: a checkpoint that takes each tensor from another rank belongs to no model at all."""

    def train():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
        rank = accelerator.process_index
        with LocalSGD(accelerator, model, 4) as local:
            accelerator.backward(model(torch.full((2, 4), rank + 1.0)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            accelerator.save_state(tmp_path / "x")
            mine = [parameter.detach().clone() for parameter in model.parameters()]
            accelerator.load_state(tmp_path / "x")
            return rank, all(torch.equal(a, b) for a, b in zip(mine, model.parameters(), strict=True))

    assert run_ranks(train, world=2) == [(0, True), (1, False)]


def test_a_hook_that_fails_on_one_rank(tmp_path):
    def load():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(2, 1))
        accelerator.save_state(tmp_path / "x")

        def hook(models, folder):
            if accelerator.process_index:
                raise RuntimeError("not here")

        accelerator.register_load_state_pre_hook(hook)
        with pytest.raises(CheckpointError, match="rank 1 failed while running the hooks before a load"):
            accelerator.load_state(tmp_path / "x")

    run_ranks(load, world=2, timeout_s=30)


@pytest.mark.parametrize("inside", [False, True], ids=["after its loop", "inside its loop"])
def test_an_evaluation_that_was_left_begins_anew(begin, tmp_path, inside):
    """As it would have in the run that went on; one that is under way is gone on with."""

    def evaluate(accelerator, loader, save=False):
        seen = []
        for (batch,) in loader:
            seen.append(batch.tolist())
            if len(seen) == 2:
                if inside and save:
                    accelerator.save_state(tmp_path / "x")
                break
        if save and not inside:
            accelerator.save_state(tmp_path / "x")
        return seen

    def run(resumed):
        accelerator, model, optimizer, loader = begin(tmp_path)
        held_out = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
        if resumed:
            accelerator.load_state(tmp_path / "x")
        for number, (batch,) in enumerate(loader):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            seen = evaluate(accelerator, held_out, save=number == 2 and not resumed)
            if number == (0 if resumed else 3):
                break
        return seen

    first = run(False)
    assert run(True) == ([[4.0, 5.0], [6.0, 7.0]] if inside else first)


def test_a_resume_reads_each_file_once_to_verify_it(begin, tmp_path, monkeypatch):
    accelerator, *_ = begin(tmp_path)
    accelerator.save_state()
    read, real = [], manifest.measure
    monkeypatch.setattr(
        manifest, "measure", lambda store, path, *rest: (read.append(path), real(store, path, *rest))[1]
    )
    path = accelerator.resume().path
    assert len(read) == len(set(read)) == 3
    accelerator.load_state(path)
    assert len(read) == 6, "what was verified once may have changed since"


def test_what_is_damaged_neither_counts_as_kept_nor_goes(begin, tmp_path, caplog):
    accelerator, *_ = begin(tmp_path, keep=Keep(last=2))
    for _ in range(3):
        accelerator.save_state()
    with open(tmp_path / "checkpoints/checkpoint_2/state.json", "a") as file:
        file.write(" ")
    assert accelerator.resume().path.endswith("checkpoint_1")
    accelerator.save_state()
    found = {name for name in os.listdir(tmp_path / "checkpoints") if not name.startswith(".")}
    assert found == {"checkpoint_1", "checkpoint_2", "checkpoint_3"}


@pytest.mark.parametrize("when", ["before its manifest is read", "after"])
def test_a_checkpoint_that_another_run_removes_while_it_is_read(tmp_path, monkeypatch, when):
    """It looks again: the other run has saved a newer one before."""
    writer, reader = Checkpointer(keep=Keep(last=1)), Checkpointer()
    state = TrainState(models={"model": nn.Linear(2, 2)})
    writer.save(tmp_path / "checkpoint_1", state)
    real = Manifest.read

    def read(store, folder):
        monkeypatch.setattr(Manifest, "read", real)
        found = real(store, folder) if when == "after" else None
        writer.save(tmp_path / "checkpoint_2", state)
        return found or real(store, folder)

    monkeypatch.setattr(
        CheckpointSearch,
        "_candidates",
        _then(CheckpointSearch._candidates, lambda: monkeypatch.setattr(Manifest, "read", read)),
    )
    assert reader.latest(tmp_path) == str(tmp_path / "checkpoint_2")


def _then(first, then):
    def both(*args):
        found = first(*args)
        then()
        return found

    return both


def test_gradients_that_wait_on_one_rank_alone(tmp_path):
    def go_on():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Linear(2, 1))
        accelerator.backward(model(torch.ones(2, 2)).mean())
        if accelerator.process_index:
            model.zero_grad()
        accelerator.save_state(tmp_path / "x")
        accelerator.load_state(tmp_path / "x")
        return [parameter.grad is None for parameter in model.parameters()]

    assert run_ranks(go_on, world=2) == [[False, False], [True, True]]


def test_both_fixes_for_other_parameter_groups_work(tmp_path):
    def model_and_optimizer(groups):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
        if groups == 2:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
        return model, optimizer

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*model_and_optimizer(1))
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    folder = tmp_path / "saved"
    accelerator.save_state(folder)
    saved = {name: value.clone() for name, value in model.state_dict().items()}

    for groups, code in ((1, "checkpoint-groups"), (2, "none")):
        again = Accelerator(cpu=True)
        model, optimizer = again.prepare(*model_and_optimizer(groups))
        try:
            again.load_state(folder)
        except CheckpointError as error:
            assert error.code == code
        else:
            assert code == "none" and len(optimizer.state) == 4
    # The optimizer starts anew.
    anew = Accelerator(cpu=True)
    model, optimizer = model_and_optimizer(1)
    model = anew.prepare(model)
    anew.load_state(folder, strict=False)
    optimizer = anew.prepare(optimizer)
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state


def test_runs_that_are_collected_while_others_are_listed() -> None:
    """Python 3.11 collects garbage while it copies a list; a callback that shortened this list crashed the process."""
    program = """
import gc
from paceline.run import run

class Held:
    pass

for _ in range(300):
    gc.disable()
    for _ in range(25):
        held = Held()
        held.own = held
        run.remember(held)
    del held
    gc.set_threshold(1, 1, 1)
    gc.enable()
    assert all(isinstance(each, Held) for each in run.live_runs())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
