"""`torch.func.functional_call` of a prepared model: gradients reach the model's own parameters, averaged over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from paceline import Accelerator
from paceline.testing import run_ranks

ROWS = 8
HOWS = ("adapted weights", "adapted by all", "averaged weights", "detached weights", "gradients of samples")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(ROWS, 4, generator=generator, dtype=torch.float64), torch.arange(ROWS) % 3


def loss_of(
    how: str, model: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor, accelerator: Accelerator | None = None
) -> Tensor:
    own = dict(model.named_parameters())
    if how.startswith("adapted"):
        inner = F.cross_entropy(functional_call(model, own, (x,)), y)
        gradients = torch.autograd.grad(inner, list(own.values()), create_graph=True)
        if how == "adapted by all" and accelerator is not None:
            gradients = [accelerator.gather(gradient[None], with_gradient=True).mean(0) for gradient in gradients]
        adapted = {name: value - 0.1 * grad for (name, value), grad in zip(own.items(), gradients, strict=True)}
        return F.cross_entropy(functional_call(model, adapted, (x,)), y)
    if how == "gradients of samples":
        values = {name: value.detach() for name, value in own.items()}

        def of_one(values: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, values, (row[None],)), label[None])

        norms = torch.func.vmap(torch.func.grad(of_one), (None, 0, 0))(values, x, y)
        weights = sum(gradient.flatten(1).square().sum(1) for gradient in norms.values())
        return (F.cross_entropy(model(x), y, reduction="none") * weights.detach()).mean()
    output = model(x)
    others = dict(teacher.named_parameters())
    if how == "detached weights":
        others = {name: value.detach() for name, value in others.items()}
    target = functional_call(model, others, (x,))
    return F.cross_entropy(output, y) + (output - target).square().mean()


def trained(hows: tuple[str, ...]) -> dict[str, list[float]]:
    weights = {}
    for how in hows:
        accelerator = Accelerator(cpu=True)
        model = net()
        teacher = copy.deepcopy(model)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        share = ROWS // accelerator.num_processes
        rows = slice(accelerator.process_index * share, (accelerator.process_index + 1) * share)
        own = accelerator.unwrap_model(model)
        for x, y in batches():
            accelerator.backward(loss_of(how, own, teacher, x[rows], y[rows], accelerator))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for average, value in zip(teacher.parameters(), own.parameters(), strict=True):
                    average.lerp_(value, 0.3)
        weights[how] = torch.cat([value.flatten() for value in own.parameters()]).tolist()
        named = [decision.field for decision in accelerator.plan.decisions]
        if how.startswith("adapted"):
            assert "adapted_weights(Sequential)" in named
        accelerator.free_memory()
    return weights


def by_hand(how: str, width: int) -> list[float]:
    model = net()
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in batches():
        parts = zip(x.chunk(width), y.chunk(width), strict=True)
        # Adapted weights are those of a rank's own samples, so that one process would adapt others.
        sum(loss_of(how, model, teacher, *part) for part in parts).div(width).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, value in zip(teacher.parameters(), model.parameters(), strict=True):
                average.lerp_(value, 0.3)
    return torch.cat([value.flatten() for value in model.parameters()]).tolist()


@pytest.mark.filterwarnings("error")
def test_gradients_reach_the_models_own_parameters() -> None:
    results = run_ranks(trained, 2, args=(HOWS,))
    for how in HOWS:
        for result in results:
            width = 1 if how == "adapted by all" else 2
            assert result[how] == pytest.approx(by_hand(how, width), rel=1e-10), how
