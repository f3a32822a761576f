"""Ctrl-C in a run that can resume: it saves and leaves as after SIGTERM, and a second one ends it at once."""

import os
import signal
import sys
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.run import preemption


@pytest.fixture
def handlers():
    """Those of the test runner, afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupted(folder, signals) -> int:
    """Trains, and sends itself a signal in each step of `signals`; returns the exit code, or the number of steps."""
    accelerator = Accelerator(cpu=True, project_dir=str(folder))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 2)), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    try:
        for step, (x,) in enumerate(loader):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            for number in signals.get(step, ()):
                os.kill(os.getpid(), number)
    except SystemExit as left:
        return left.code
    finally:
        accelerator.end_training()
    return step + 1


def test_ctrl_c_saves_and_leaves(tmp_path, handlers, caplog, capfd):
    assert interrupted(tmp_path, {1: [signal.SIGINT]}) == 130
    assert (tmp_path / "checkpoints" / "checkpoint_0" / "manifest.json").is_file()
    assert "asked to end (SIGINT): saved" in caplog.text and "exit code 130" in caplog.text
    assert capfd.readouterr().err.count("interrupted: the run saves after this step") == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "put back by end_training"


@pytest.fixture
def slow_signals(monkeypatch):
    """Signals that come 5 s after each other."""
    clock = count(0, 5)
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: next(clock)))


def test_a_launchers_sigterm_after_ctrl_c_is_the_same_request(tmp_path, handlers, slow_signals):
    assert interrupted(tmp_path, {1: [signal.SIGINT, signal.SIGTERM]}) == 130


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, handlers, slow_signals, capfd):
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, {1: [signal.SIGINT, signal.SIGINT]})
    assert not (tmp_path / "checkpoints").exists()
    assert "interrupted again: the run ends at once, without a save" in capfd.readouterr().err


def test_a_handler_of_the_script_is_called_too(tmp_path, handlers):
    heard = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    assert interrupted(tmp_path, {0: [signal.SIGINT]}) == 130 and heard == [signal.SIGINT]


def test_at_a_prompt_ctrl_c_is_left_alone(tmp_path, handlers, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, {1: [signal.SIGINT]})
