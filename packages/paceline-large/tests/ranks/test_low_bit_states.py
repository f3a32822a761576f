"""Optimizers with states in 8 bits step as on one process under every plan, and resume at another width."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from late_module import LateModule
from shared_ranks import run_ranks
from torch import Tensor, nn

from paceline import Accelerator

OPTIM = LateModule("torchao.optim")
bnb = LateModule("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore")

TABLE = {"0": "colwise", "2": "rowwise", "4": "replicated"}
PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"replicate": 2},
    "zero1": {"shard": 2, "zero": 1},
    "zero2": {"shard": 2, "zero": 2},
    "shard": {"shard": 2},
    "tp": {"tp": 2, "options": {"tensor": {"plan": TABLE}}},
}
CASES = [("adamw8bit", plan) for plan in PLANS]
CASES += [("AdamW8bit", "zero2"), ("AdamW8bit", "shard"), ("PagedAdamW", "shard")]  # bitsandbytes'
STEPS = 4


@pytest.fixture(autouse=True)
def without_a_compiler() -> Iterator[None]:
    """torchao compiles its step for each shape, which takes seconds; the ranks are forks."""
    with torch.compiler.set_stance("force_eager"):
        yield


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    # Of the two large weights, one divides into blocks of 256 values and one does not.
    layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 66), nn.Tanh(), nn.Linear(66, 1)]
    return nn.Sequential(*layers).to(dtype)


def optimizer_of(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw8bit":
        from paceline.optim import adamw8bit

        return adamw8bit(net.parameters(), lr=1e-2)
    made: torch.optim.Optimizer = getattr(bnb.optim, kind)(net.parameters(), lr=1e-2)
    return made


class Run:
    def __init__(self, plan: str, kind: str, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        self.accelerator = Accelerator(cpu=True, plan=PLANS.get(plan, {}))
        net = model(dtype)
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer_of(kind, net))

    def train(self, *numbers: int) -> Run:
        layout = self.accelerator.plan.layout
        for number in numbers:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).to(self.dtype)
            x = x.chunk(layout.width)[layout.data_index(self.accelerator.process_index)]
            self.accelerator.backward((self.model(x) - x.sum(1, keepdim=True)).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def weights(self) -> dict[str, Tensor]:
        state = self.accelerator.get_state_dict(self.model)
        return {name: torch.as_tensor(value).clone() for name, value in state.items()}

    def state_bytes(self) -> int:
        """Bytes of the states that this rank keeps, without numbers of steps and tables of codes."""
        tensors: list[Tensor] = []
        for state in self.optimizer.state.values():
            for value in state.values():
                if not isinstance(value, Tensor) or not value.dim():
                    continue
                tensors += [value.codes, value.scale] if hasattr(value, "codes") else [value]
        return sum(tensor.nbytes for tensor in tensors)


@cache
def alone(kind: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], int]:
    run = Run("alone", kind, dtype).train(*range(STEPS))
    return run.weights(), run.state_bytes()


def test_the_steps_of_one_process_and_a_resume_under_each_other_plan(tmp_path) -> None:
    def work() -> dict[tuple[str, str], tuple[dict[str, Tensor], list[str], int]]:
        outcome = {}
        for kind, plan in CASES:
            run = Run(plan, kind).train(0, 1)
            run.accelerator.save_state(str(tmp_path / f"{kind}-{plan}"))
            run.train(2, 3)
            fields = [decision.field for decision in run.accelerator.plan.decisions]
            outcome[kind, plan] = run.weights(), fields, run.state_bytes()
        return outcome

    def resumed(width: int) -> dict[tuple[str, str], dict[str, Tensor]]:
        outcome = {}
        for (kind, saved), (_, plan) in zip(CASES, [*CASES[2:], *CASES[:2]], strict=True):
            run = Run(plan if width > 1 else "alone", kind)
            run.accelerator.load_state(str(tmp_path / f"{kind}-{saved}"))
            outcome[kind, saved] = run.train(2, 3).weights()
        return outcome

    first, second = run_ranks(work, 2)
    for (kind, plan), (weights, fields, num_bytes) in first.items():
        expected, bytes_alone = alone(kind)
        # In float64 the order in which gradients are added does not move a state to another code.
        torch.testing.assert_close(
            weights, expected, rtol=0, atol=1e-9, msg=lambda text, at=(kind, plan): f"{at}: {text}"
        )
        assert (f"optimizer.{'AdamW8bit' if kind == 'adamw8bit' else kind}.numbers" in fields) == (kind != "PagedAdamW")
        both = num_bytes + second[kind, plan][2]
        assert both == (2 * bytes_alone if plan == "replicate" else bytes_alone)
    for width in (2, 1):
        for (kind, saved), weights in run_ranks(resumed, width, args=(width,))[0].items():
            torch.testing.assert_close(
                weights, alone(kind)[0], rtol=0, atol=1e-9, msg=lambda text, at=(kind, saved): f"{at}: {text}"
            )


def test_in_float32_a_state_may_be_rounded_to_another_code() -> None:
    def work() -> dict[str, Tensor]:
        return Run("zero1", "adamw8bit", torch.float32).train(*range(STEPS)).weights()

    expected, _ = alone("adamw8bit", torch.float32)
    before = model(torch.float32).state_dict()
    (weights, _) = run_ranks(work, 2)
    moved = torch.cat([(expected[name] - before[name]).flatten() for name in before])
    differences = torch.cat([(weights[name] - expected[name]).flatten() for name in before])
    assert differences.norm() < 0.01 * moved.norm()
