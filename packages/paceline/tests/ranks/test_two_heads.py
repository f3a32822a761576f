"""Two heads of one model with an optimizer each, in windows of two micro-batches: each has the gradient of its own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.testing import run_ranks

ROWS, BATCH, WINDOW = 40, 8, 2
PLANS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"shard": 2}],
}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(torch.tanh(self.body(x)))


def parts() -> tuple[Heads, list[torch.optim.Optimizer], TensorDataset]:
    torch.manual_seed(0)
    model = Heads().double()
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in (model.first, model.second)]
    return model, optimizers, TensorDataset(torch.randn(ROWS, 4).double(), torch.randn(ROWS, 4).double())


def plain() -> list[float]:
    model, optimizers, data = parts()
    norms = []
    for x, y in DataLoader(data, WINDOW * BATCH):
        for optimizer, head in zip(optimizers, ("first", "second"), strict=True):
            optimizer.zero_grad()
            (model(x, head) - y).square().mean().backward()
            norms.append(float(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 9.0)))
            optimizer.step()
    return norms


def prepared(plan: dict[str, Any], items: bool, clears: str) -> list[float]:
    model, optimizers, data = parts()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, split_batches=True, plan=plan)
    model, *optimizers, loader = accelerator.prepare(model, *optimizers, DataLoader(data, BATCH))
    norms = []
    for x, y in loader:
        with accelerator.accumulate(model):
            for optimizer, head in zip(optimizers, ("first", "second"), strict=True):
                if clears == "before":
                    optimizer.zero_grad()
                errors = (model(x, head) - y).square()
                if items:
                    accelerator.backward(errors.sum(), num_items=errors.numel())
                else:
                    accelerator.backward(errors.mean())
                norm = accelerator.clip_grad_norm_(optimizer.param_groups[0]["params"], 9.0)
                if accelerator.sync_gradients:
                    norms.append(float(norm))
                optimizer.step()
                if clears == "after":
                    optimizer.zero_grad()
    accelerator.free_memory()
    return norms


@pytest.mark.parametrize("world", PLANS)
def test_each_head_has_the_gradient_of_its_own_loss(world: int) -> None:
    cases = [
        (plan, items, clears) for plan in PLANS[world] for items in (False, True) for clears in ("before", "after")
    ]

    def run() -> list[list[float]]:
        return [prepared(*case) for case in cases]

    right = plain()
    for norms_of_rank in run_ranks(run, world=world):
        for case, norms in zip(cases, norms_of_rank, strict=True):
            assert norms == pytest.approx(right), case
