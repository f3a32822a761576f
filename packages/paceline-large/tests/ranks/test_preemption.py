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


def evaluate_and_train(
    folder: str, place: str, asked: dict[int, int], plan: dict[str, Any] | None = None
) -> tuple[Any, dict[str, float], list[str]]:
    """Trains two epochs with evaluations; rank r gets SIGTERM in its evaluation batch `asked[r]`, counted from 1.

    Args:
        place: of the evaluation: "after" the epoch and the step of its schedule, or in the "body" of the training loop:
            after its step, or at its "top".

    Returns the exit code, what was computed by name, and the names in their order.
    """
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, data_seed=2, split_batches=True, project_dir=folder, plan=plan)
    data = TensorDataset(torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1)))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule, loader, evaluation = accelerator.prepare(
        model, optimizer, schedule, DataLoader(data, BATCH, shuffle=True), DataLoader(data, 2)
    )
    start = accelerator.resume()
    step, batches, numbers = start.step, 0, {}

    def evaluate(name: str) -> None:
        nonlocal batches
        model.eval()
        total = 0.0
        # FSDP2 keeps memory that its first forward pass took: in inference mode none could be trained with afterwards.
        with torch.no_grad() if plan else torch.inference_mode():
            for (x,) in evaluation:
                total += accelerator.gather_for_metrics(model(x)).sum().item()
                batches += 1
                if asked.get(accelerator.process_index) == batches:
                    os.kill(os.getpid(), signal.SIGTERM)
        model.train()
        numbers[name] = total

    code = 0
    try:
        for epoch in range(start.epoch, 2):
            for (x,) in loader:
                if place == "top" and step % 2:
                    evaluate(f"evaluation before step {step + 1}")
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                numbers[f"loss {step}"] = accelerator.reduce(loss.detach(), "mean").item()
                numbers[f"rate {step}"] = optimizer.param_groups[0]["lr"]
                if place == "body" and step % 2:
                    evaluate(f"evaluation after step {step}")
            schedule.step()
            if place == "after":
                evaluate(f"evaluation of epoch {epoch}")
    except SystemExit as left:
        code = left.code
    accelerator.states.end()  # the signal means again what it did, while the process group stays
    return code, numbers, list(numbers)


PLACES = ("after", "body", "top")


def in_each_place(folder: str, asked: dict[int, int]) -> dict[str, Any]:
    found = {place: evaluate_and_train(f"{folder}/{place}", place, asked) for place in PLACES}
    found["divided"] = evaluate_and_train(f"{folder}/divided", "after", asked, {"shard": 2})
    return found


def test_an_evaluation_is_left_and_repeated(tmp_path):
    """All numbers of the two runs together are those of one that was never stopped, bit for bit."""
    whole = run_ranks(in_each_place, 2, args=(str(tmp_path / "whole"), {}))[0]
    # Batch 28 of rank 1 lies in the second evaluation; rank 0 hears of it from the store.
    first, other = run_ranks(in_each_place, 2, args=(str(tmp_path / "run"), {1: 28}))
    rest = run_ranks(in_each_place, 2, args=(str(tmp_path / "run"), {}))[0]
    for place, (code, numbers, order) in whole.items():
        assert code == 0 and first[place][0] == other[place][0] == PREEMPTED, place
        both = {**first[place][1], **rest[place][1]}
        repeated = set(first[place][2]) & set(rest[place][2])
        missing = [key for key in order if key not in both]
        assert not repeated and {key: numbers[key] for key in both} == both, place
        # In the body of the training loop an evaluation is the script's own, and goes on with the next batch.
        assert len(missing) == (place == "body") and all("evaluation" in key for key in missing), (place, missing)


def train_in_evaluation_without_a_loader(folder: str) -> Any:
    """An evaluation over no prepared loader has no place to leave at: the next step's end is one."""
    accelerator = Accelerator(cpu=True, project_dir=folder)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.randn(8, 3), 2))
    accelerator.resume()
    batches = 0
    try:
        for _ in range(3):
            for x in loader:
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            for _ in DataLoader(torch.randn(6, 3)):
                batches += 1
                if batches == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as left:
        return left.code, batches
    return "all"


def test_an_evaluation_that_has_no_prepared_loader_goes_on(tmp_path):
    assert run_ranks(train_in_evaluation_without_a_loader, 1, args=(str(tmp_path),)) == [(PREEMPTED, 6)]
