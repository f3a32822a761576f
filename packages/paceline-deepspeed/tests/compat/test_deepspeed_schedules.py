"""DeepSpeed's schedules: errors, the habit that can be turned off, and their place in a run of ours."""

from __future__ import annotations

import argparse
import math

import pytest
import torch
from torch import nn

from paceline import Accelerator, ConfigError, PrepareError
from paceline_deepspeed.config import read
from paceline_deepspeed.schedules import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupLR,
    add_tuning_arguments,
    build,
    of_config,
)


def adam(groups: int = 1, **options: object) -> torch.optim.AdamW:
    made = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1 * (number + 1)} for number in range(groups)]
    return torch.optim.AdamW(made, **options)  # type: ignore[arg-type]


def rates(schedule: object, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(schedule.optimizer.param_groups[0]["lr"])  # type: ignore[attr-defined]
        schedule.step()  # type: ignore[attr-defined]
    return found


def test_the_first_two_updates_stand_at_the_minimum_unless_it_is_turned_off() -> None:
    assert rates(WarmupLR(adam(), warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear"), 6) == [
        0, 0, 0.25, 0.5, 0.75, 1.0]  # fmt: skip
    config = {
        "train_batch_size": 1,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"},
        },
        "paceline": {"warmup_first_step": True},
    }
    assert rates(of_config(read(config), adam()), 5) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert of_config(read({"train_batch_size": 1}), adam()) is None
    cosine = WarmupCosineLR(adam(), total_num_steps=9, warmup_num_steps=4, warmup_first_step=True)
    assert rates(cosine, 1) == [pytest.approx(0.1 * math.log(2) / math.log(4))]


def test_beta2_can_be_left_alone() -> None:
    optimizer = adam(betas=(0.7, 0.95))
    OneCycle(optimizer, 0.1, 0.2, cycle_beta2=None).step()
    assert optimizer.param_groups[0]["betas"][1] == 0.95
    OneCycle(optimizer, 0.1, 0.2)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)


def test_a_rate_for_each_group() -> None:
    optimizer = adam(2)
    schedule = WarmupLR(optimizer, warmup_min_lr=[0.01, 0.02], warmup_num_steps=3)
    assert schedule.get_last_lr() == [0.01, 0.02]
    schedule.step(50)
    assert schedule.get_lr() == [0.1, 0.2] and schedule.state_dict() == {"last_batch_iteration": 50}
    tensors = adam()
    tensors.param_groups[0]["lr"] = torch.tensor(0.5)
    LRRangeTest(tensors, 0.25).step()
    assert isinstance(tensors.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("WarmUpLR", {}, "'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 3}, "did you mean 'warmup_num_steps'"),
        ("WarmupDecayLR", {}, "total_num_steps is missing"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "cycle_max_lr is missing"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps=0"),
        ("LRRangeTest", {"lr_range_test_step_size": 1.5}, "1.5"),
        ("WarmupLR", {"warmup_max_lr": [1, 2]}, "warmup_max_lr has 2 values"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "a cycle needs steps"),
    ],
)
def test_what_cannot_be_built(kind: str, params: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=r"\[deepspeed-schedule\]") as caught:
        build(kind, adam(), params)
    assert said in str(caught.value)


def test_what_is_no_optimizer() -> None:
    with pytest.raises(PrepareError, match=r"\[schedule-optimizer\]"):
        WarmupLR(nn.Linear(1, 1))


def test_a_schedule_of_torchs() -> None:
    schedule = build("StepLR", adam(), {"step_size": 2, "gamma": 0.5})
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)


def test_in_a_run_without_deepspeeds_engine() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    seen = []
    for _ in range(4):
        seen.append(schedule.get_last_lr()[0])
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert seen == [0.0, 0.0, 0.125, 0.25]
    assert schedule.state_dict() == {"last_batch_iteration": 3}


def test_flags_of_a_script() -> None:
    parser = add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--lr_schedule", "WarmupLR", "--warmup_num_steps", "7", "--cycle_momentum"])
    assert (args.lr_schedule, args.warmup_num_steps, args.cycle_momentum) == ("WarmupLR", 7, True)
    assert (args.warmup_max_lr, args.cycle_first_stair_count, args.lr_range_test_staircase) == (0.001, -1, False)
