"""`shard` in every form gives one plain process's losses, norms and weights; and what happens at its edges.

The lead suite (`test_parity_plans.py`) crosses plans; here one loop goes through the options of `shard` itself.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from parity_models import GPT, loss_of
from torch import nn

from paceline.testing import run_ranks

ROWS, STEPS = 8, 3


class Odd(nn.Module):
    """Rows that do not divide, a single number, frozen rows inside a block, and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh()) for _ in range(3)
        )
        self.blocks[1][0].requires_grad_(False)
        self.blocks[2][2].bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(5, 24)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.gain


class Twins(nn.Module):
    """Blocks that share a weight with each other, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.blocks[2][0].weight = self.blocks[1][0].weight
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return self.head(x)


MODELS: dict[str, Any] = {
    "gpt": GPT,
    "tied": lambda: GPT(tied=True, frozen=True),
    "odd": Odd,
    "twins": Twins,
}


@dataclass(frozen=True)
class Case:
    model: str = "gpt"
    optimizer: str = "AdamW"
    accumulate: int = 1
    clip: float | None = None
    precision: str = "no"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = MODELS[case.model]()
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "Muon":
        trained = [p for p in trained if p.dim() == 2]
    # Adam turns the last bit of a gradient near zero into a whole step: a larger eps compares what training computes.
    named = {"SGD": {"momentum": 0.9}, "Muon": {}}.get(case.optimizer, {"eps": 1e-4})
    return model, getattr(torch.optim, case.optimizer)(trained, lr=0.01, **named)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 24, (STEPS * ROWS, 9), generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in tokens.split(ROWS)]


def plain(case: Case) -> dict[str, Any]:
    """One process without Paceline, each batch whole."""
    model, optimizer = made(case)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    losses, norms = [], []
    for x, y in batches():
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            output = model(x)
        loss = loss_of(output.float(), y)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "weights": model.state_dict()}


def ours(case: Case, plan: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The same through `Accelerator`; this rank's rows of each batch, in micro-batches."""
    from paceline import Accelerator

    model, optimizer = made(case)
    accelerator = Accelerator(
        case.precision, case.accumulate, plan=plan, options={"shard": options}, cpu=True, scaler={"init_scale": 256.0}
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    layout = accelerator.plan.layout
    losses, norms = [], []
    for x, y in batches():
        total = 0.0
        for micro in range(case.accumulate):
            rows = slice(
                layout.data_index(accelerator.process_index) + layout.width * micro,
                None,
                layout.width * case.accumulate,
            )
            with accelerator.accumulate(model):
                loss = loss_of(model(x[rows]), y[rows])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
                optimizer.step()
                optimizer.zero_grad()
            total += float(accelerator.reduce(loss.detach(), "mean"))
        losses.append(total / case.accumulate)
    return {"losses": losses, "norms": norms, "weights": accelerator.get_state_dict(model)}


@cache
def reference(case: Case) -> dict[str, Any]:
    return run_ranks(plain, world=1, args=(case,))[0]


def check(case: Case, options: dict[str, Any] | None = None, plan: dict[str, Any] | None = None) -> None:
    plan = plan or {"shard": 2}
    world = plan.get("shard", 1) * plan.get("replicate", 1) * plan.get("cp", 1)
    want = reference(Case(case.model, case.optimizer, 1, case.clip, case.precision))
    tolerance = {"no": 2e-6, "bf16": 2e-2, "fp16": 2e-3}[case.precision]
    if case.optimizer == "Muon":  # its iteration runs in bfloat16, whose sums of parts round differently
        tolerance = 1e-3
    for got in run_ranks(ours, world=world, args=(case, plan, options or {}), timeout_s=120):
        assert got["losses"] == pytest.approx(want["losses"], abs=tolerance)
        assert got["norms"] == pytest.approx(want["norms"], abs=tolerance)
        assert sorted(got["weights"]) == sorted(want["weights"])
        for name, weight in want["weights"].items():
            torch.testing.assert_close(
                got["weights"][name], weight, atol=tolerance, rtol=0, msg=lambda m, n=name: n + m
            )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_models(model: str, accumulate: int) -> None:
    check(Case(model, accumulate=accumulate, clip=0.3))


@pytest.mark.parametrize("plan", [{"shard": 4}, {"replicate": 2, "shard": 2}], ids=["four", "hybrid"])
def test_four(plan: dict[str, Any]) -> None:
    check(Case("odd", accumulate=2, clip=0.3), plan=plan)


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": "none"},
        {"wrap": "size", "min_params": 200},
        {"wrap": ["Block", "Attention"]},
        {"wrap": "LayerNorm"},
        {"reshard": "no"},
        {"prefetch": 2},
        {"ignored": "blocks.1, LayerNorm"},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    check(Case("gpt", accumulate=2, clip=0.3), options)


def test_parts_are_kept_on_fewer_ranks() -> None:
    check(Case("gpt", clip=0.3), {"reshard": 2}, {"shard": 4})


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop", "NAdam", "Muon"])
def test_optimizers(optimizer: str) -> None:
    check(Case("gpt", optimizer))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"param_dtype": "none"}, {"ignored": "head"}], ids=str)
def test_half_precision(precision: str, options: dict[str, Any]) -> None:
    check(Case("tied" if not options else "gpt", "SGD", 2, 0.3, precision), options)
