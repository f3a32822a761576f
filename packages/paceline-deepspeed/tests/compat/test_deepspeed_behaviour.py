"""What a script sees of DeepSpeed's engine, with numbers that deepspeed 0.19.8 gave on one process (gloo, CPU, torch 2.13)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.testing import run_ranks
from paceline_deepspeed.config import read
from paceline_deepspeed.initialize import initialize

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
}


def engine_of(**keys: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    return initialize(model=model, model_parameters=model.parameters(), config={"train_batch_size": 4, **keys})[0]


def losses(engine: Any, *steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(64, 4, 4, generator=generator), torch.randn(64, 4, 1, generator=generator)
    values = []
    for step in steps:
        loss = ((engine(inputs[step]) - targets[step]) ** 2).mean()
        engine.backward(loss)
        engine.step()
        values.append(loss.item())
    return values


def load_into_engines_with_less(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for stage in (0, 2):
        zero = {"zero_optimization": {"stage": stage}}
        saving = engine_of(**zero, **ADAM, **WARMUP)
        losses(saving, 0, 1, 2)
        saving.save_checkpoint(folder / str(stage), client_state={"k": 1})
        constant = engine_of(**zero, **ADAM)
        _, client_state = constant.load_checkpoint(folder / str(stage))
        seen[f"no scheduler {stage}"] = [
            client_state,
            constant.global_steps,
            losses(constant, 3, 4, 5),
            constant.get_lr(),
        ]
        idle = engine_of()
        _, client_state = idle.load_checkpoint(folder / str(stage))
        inputs = torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(5))
        seen[f"no optimizer {stage}"] = [client_state, idle.global_steps, idle(inputs[0]).sum().item()]
    return seen


def test_a_checkpoint_loads_into_an_engine_without_its_scheduler_or_optimizer(tmp_path: Path) -> None:
    (seen,) = run_ranks(load_into_engines_with_less, 1, args=(tmp_path,))
    for stage in (0, 2):
        client_state, steps, values, rates = seen[f"no scheduler {stage}"]
        assert (client_state, steps) == ({"k": 1}, 3)
        assert values == pytest.approx([0.831878, 0.479731, 0.24679], abs=2e-6)
        assert rates == pytest.approx([0.002])
        client_state, steps, output = seen[f"no optimizer {stage}"]
        assert (client_state, steps, output) == ({"k": 1}, 3, pytest.approx(-1.129993, abs=2e-6))


def train_models_of_16_bits() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for stage in (0, 2, 3):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Linear(1, 1)).to(dtype)
            model[3].requires_grad_(False)
            nn.init.ones_(model[3].get_parameter("weight"))
            nn.init.zeros_(model[3].get_parameter("bias"))
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
                "zero_optimization": {"stage": stage},
                name: {"enabled": True},
            }
            engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
            for _ in range(20):
                loss = engine(x).float().square().mean()
                engine.backward(loss)
                engine.step()
            dtypes = [str(engine.module[0].weight.dtype), str(engine.module[3].weight.dtype)]
            seen[f"{name} {stage}"] = [loss.item(), dtypes]
    return seen


def test_small_steps_are_not_lost_in_a_model_of_16_bits() -> None:
    """It is trained with float32 masters, as by DeepSpeed: in bf16 itself the loss ends at 0.00687, and float16 is refused."""
    (seen,) = run_ranks(train_models_of_16_bits, 1)
    expected = {"bf16": 0.005703, "fp16": 0.005742}
    for case, (loss, dtypes) in seen.items():
        name = case.split()[0]
        assert loss == pytest.approx(expected[name], abs=2e-6), case
        assert dtypes == ["torch.float32", {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[name]]


def train_one_model_twice() -> list[list[float]]:
    seen = []
    for stage in range(4):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(4, 4)
        values = []
        for rate in (0.01, 0.05):
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": "Adam", "params": {"lr": rate, "torch_adam": True}},
                "zero_optimization": {"stage": stage},
            }
            engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
            for _ in range(3):
                loss = engine(x).square().mean()
                engine.backward(loss)
                engine.step()
                values.append(loss.item())
            del engine
        seen.append(values)
    return seen


@pytest.mark.parametrize("procs", [1, 2])
def test_a_model_gets_a_second_engine(procs: int) -> None:
    expected = [0.030765, 0.015703, 0.007851, 0.004796, 0.061213, 0.007119]
    for rank in run_ranks(train_one_model_twice, procs):
        assert rank == [pytest.approx(expected, abs=2e-6)] * 4


def norms() -> list[tuple[float, str]]:
    seen = []
    for stage in (1, 2, 3):
        keys = {"zero_optimization": {"stage": stage}, "train_batch_size": 12, "gradient_accumulation_steps": 3}
        engine = engine_of(**keys, gradient_clipping=1.0, **ADAM, **WARMUP)
        assert engine.get_global_grad_norm() is None
        for window in ((0, 1, 2), (3, 4, 5)):
            losses(engine, *window)
            norm = engine.get_global_grad_norm()
            seen.append((norm.item(), f"{norm:.3f}"))
    return seen


def test_the_norm_of_the_gradients_is_a_tensor() -> None:
    (seen,) = run_ranks(norms, 1)
    expected = [(pytest.approx(0.83822, abs=1e-5), "0.838"), (pytest.approx(0.96151, abs=1e-5), "0.962")]
    assert seen == expected * 3


def test_steps_per_print_may_be_infinite(tmp_path: Path) -> None:
    config = {"train_batch_size": 4, "steps_per_print": math.inf}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert read(config)["steps_per_print"] == read(path)["steps_per_print"] == math.inf


def own_loaders() -> list[Any]:
    engine, rows = engine_of(**ADAM), list(range(22))
    training, evaluation = engine.deepspeed_io(rows), engine.deepspeed_io(rows, batch_size=5, route="eval")
    return [[batch.tolist() for batch in training], [batch.tolist() for batch in evaluation]]


def test_a_script_makes_further_loaders() -> None:
    seen = run_ranks(own_loaders, 2)
    training, evaluation = seen[0]
    assert [len(batch) for batch in training][:-1] == [2] * (len(training) - 1)
    assert {row for training, _ in seen for batch in training for row in batch} == set(range(22))
    assert training[0] != [0, 1]
    # On the route of an evaluation each rank reads all samples.
    assert evaluation[0] == [0, 1, 2, 3, 4] and seen[1][1][0] == [0, 1, 2, 3, 4]
