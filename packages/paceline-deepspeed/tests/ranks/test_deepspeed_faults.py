"""Faults of DeepSpeed's arithmetic that are not copied; each test shows what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.testing import run_ranks

STAGES = (0, 1, 2, 3)


class Slope(nn.Module):
    """Its gradient is the input, whatever the weights: every step should be the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def weight_of(engine: Any) -> torch.Tensor:
    """The whole weight, on every rank."""
    return next(iter(engine.accelerator.get_state_dict(engine.prepared_model).values())).clone()


def engine_of(stage: int, optimizer: dict[str, Any], fp16: dict[str, Any], clip: float = 0.0) -> Any:
    from paceline.compat import install

    install(["deepspeed"])
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clip,
        "optimizer": optimizer,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, **fp16},
    }
    model = Slope()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def constant(fp16: dict[str, Any], clip: float = 0.0) -> dict[int, Any]:
    """Scales, steps and norms of a gradient that is always (1, 2, .. 6), at each stage."""
    found = {}
    for stage in STAGES:
        engine = engine_of(stage, {"type": "SGD", "params": {"lr": 0.5}}, fp16, clip)
        before, rows = weight_of(engine), []
        for _ in range(7):
            scale = engine.optimizer.cur_scale
            engine.backward(engine(torch.arange(1.0, 7.0)))
            engine.step()
            after = weight_of(engine)
            rows.append((scale, (before - after).tolist(), engine.get_global_grad_norm()))
            before = after
        found[stage] = rows
    return found


@pytest.fixture(scope="module")
def steady() -> dict[str, Any]:
    """Both runs of a constant gradient, in one start of two ranks."""
    return run_ranks(both, world=2)[0]


def both() -> dict[str, Any]:
    window = {"initial_scale_power": 4, "loss_scale_window": 2}
    return {"free": constant(window), "clipped": constant(window, clip=1.0), "static": constant({"loss_scale": 128.0})}


@pytest.mark.parametrize("stage", STAGES)
def test_a_constant_gradient_takes_constant_steps_while_the_scale_doubles(steady: dict[str, Any], stage: int) -> None:
    """DeepSpeed divides by the new scale in the step that doubles it: half a step, at stages 1 to 3."""
    rows = steady["free"][stage]
    assert [scale for scale, *_ in rows] == [16.0, 16.0, 16.0, 32.0, 32.0, 64.0, 64.0]
    for _, moved, _ in rows:
        assert moved == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_that_is_clipped_is_that_of_the_gradient_while_the_scale_doubles(
    steady: dict[str, Any], stage: int
) -> None:
    """DeepSpeed's stage 3 reports and clips half the norm there."""
    length = sum(each * each for each in range(1, 7)) ** 0.5
    for _, moved, norm in steady["clipped"][stage]:
        assert norm == pytest.approx(length, rel=1e-5)
        assert moved == pytest.approx([0.5 * each / length for each in range(1, 7)], rel=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_is_multiplied_by_what_gradients_are_divided_by(steady: dict[str, Any], stage: int) -> None:
    """DeepSpeed's stage 0 divides only, so that SGD moves by 1/128 of its step here."""
    for scale, moved, _ in steady["static"][stage]:
        assert scale == 128.0
        assert moved == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])


def first_adam_steps() -> dict[int, Any]:
    found = {}
    for stage in STAGES:
        params = {"lr": 0.25, "eps": 1e-12, "weight_decay": 0.0}
        engine = engine_of(stage, {"type": "Adam", "params": params}, {"initial_scale_power": 4})
        engine.backward(engine(torch.arange(1.0, 7.0)))
        engine.step()
        found[stage] = (-weight_of(engine)).tolist()
    return found


def test_adams_first_step_is_its_rate() -> None:
    """DeepSpeed's stage 0 takes a step of zero gradients beforehand, so that its first real one is 0.74 of that."""
    for moved in run_ranks(first_adam_steps, world=2)[0].values():
        assert moved == pytest.approx([0.25] * 6, rel=1e-4)


def stage_0_hysteresis() -> list[float]:
    engine = engine_of(0, {"type": "SGD", "params": {"lr": 0.0}}, {"initial_scale_power": 4, "hysteresis": 3})
    scales = []
    for _ in range(4):
        scales.append(engine.optimizer.cur_scale)
        engine.backward(engine(torch.full((6,), 1e38)) * 10.0)
        engine.step()
    assert engine.skipped_steps == engine.global_steps == 4
    return scales


def test_hysteresis_holds_at_stage_0_too() -> None:
    """DeepSpeed's stage 0 halves at every overflow; the others wait, as they do here."""
    assert run_ranks(stage_0_hysteresis, world=2)[0] == [16.0, 16.0, 16.0, 8.0]
