"""SIGTERM at one rank, or at all: every rank saves after the same step, and a run of any width goes on from there."""

import multiprocessing
import os
import signal
import subprocess
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, LocalSGD
from paceline.base.exits import PREEMPTED
from paceline.testing import run_ranks

ROWS, BATCH = 48, 12


def train(
    folder: str, asked: dict[int, int], local: int = 0, plan: dict[str, Any] | None = None, skips: int = 0
) -> Any:
    """Two epochs over global batches; `asked[rank]` is the step in which that rank gets SIGTERM."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, data_seed=2, split_batches=True, project_dir=folder, plan=plan)
    data = TensorDataset(torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(data, BATCH, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = accelerator.resume()
    step, losses = start.step, {}
    averaged = LocalSGD(accelerator, model, max(1, local), enabled=bool(local))
    try:
        with averaged:
            for _ in range(start.epoch, 2):
                for (x,) in loader:
                    loss = model(x).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    averaged.step()
                    step += 1
                    losses[step] = accelerator.reduce(loss.detach(), "mean").item() if not local else 0.0
                    if asked.get(accelerator.process_index) == step:
                        os.kill(os.getpid(), signal.SIGTERM)
        code = 0
    except SystemExit as left:
        code = left.code
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist() if not plan else []
    return step, code, losses, weights


@pytest.mark.parametrize("asked", [{1: 2}, {0: 1, 1: 1, 2: 1}, {0: 3, 2: 4}], ids=["one", "all", "two"])
def test_all_ranks_stop_after_one_step_and_another_width_goes_on(tmp_path, asked):
    whole = run_ranks(train, 1, args=(str(tmp_path / "whole"), {}))[0]
    first = run_ranks(train, 3, args=(str(tmp_path / "run"), asked))
    stopped = {step for step, *_ in first}
    assert len(stopped) == 1 and {code for _, code, *_ in first} == {PREEMPTED}
    assert min(asked.values()) < min(stopped) <= min(asked.values()) + 2
    rest = run_ranks(train, 2, args=(str(tmp_path / "run"), {}))[0]
    losses = first[0][2] | rest[2]
    assert rest[1] == 0 and sorted(losses) == sorted(whole[2])
    assert max(abs(losses[step] - whole[2][step]) for step in losses) < 1e-5


def test_divided_parameters(tmp_path):
    first = run_ranks(train, 2, args=(str(tmp_path), {1: 2}, 0, {"shard": 2}))
    assert {(step, code) for step, code, *_ in first} == {(4, PREEMPTED)}
    assert run_ranks(train, 1, args=(str(tmp_path), {}))[0][0] == 8


def test_local_steps_stop_where_ranks_are_alike(tmp_path):
    stopped = run_ranks(train, 2, args=(str(tmp_path), {1: 1}, 2))
    assert [(step, code) for step, code, *_ in stopped] == [(6, PREEMPTED)] * 2
    assert stopped[0][3] == stopped[1][3]


def train_with_workers(folder: str) -> Any:
    accelerator = Accelerator(cpu=True, project_dir=folder)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(200, 3)), 2, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    step, workers = 0, []
    try:
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 2:
                workers = multiprocessing.active_children()
                everybody = [str(each) for each in (os.getpid(), *(worker.pid for worker in workers))]
                subprocess.run(["kill", "-TERM", *everybody], check=True)  # from a process that is none of them
    except SystemExit as left:
        for worker in workers:
            worker.terminate()  # as torch does with one that does not come to its end
            worker.join(10)
        return step, left.code, [worker.exitcode for worker in workers], os.listdir(f"{folder}/checkpoints")
    return "all batches"


def test_loader_workers_outlast_a_signal_to_everybody(tmp_path):
    left = run_ranks(train_with_workers, 2, args=(str(tmp_path),))
    assert left == [(4, PREEMPTED, [0, 0], ["checkpoint_0"])] * 2
