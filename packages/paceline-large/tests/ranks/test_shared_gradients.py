"""Tensor parallel with micro-batches: gradients that autograd hands to several parameters at once."""

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn

from paceline import Accelerator


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Adds parameters to a sequence of 3 positions before its blocks, in one of several ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        sizes = {
            "two": [(1, 3, 4)] * 2,
            "three": [(1, 3, 4)] * 3,
            "views": [(3, 4)] * 2,
            "rows": [(4,), (1, 3, 4), (1, 1, 4)],
        }
        sizes |= {"expanded": [(1, 1, 4)] * 2, "blocks": [], "single": [(4,), (4,)], "tables": []}
        for number, size in enumerate(sizes[way]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(size)))
        self.names = [f"p{number}" for number in range(len(sizes[way]))]
        if way == "tables":
            self.positions, self.kinds = nn.Embedding(3, 4), nn.Embedding(3, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        if self.way == "single":
            x = x[0, 0]
        if self.way == "tables":
            x = x + self.positions.weight + self.kinds.weight
        for name in self.names:
            parameter = getattr(self, name)
            if self.way == "views":
                parameter = parameter.unsqueeze(0)
            elif self.way == "expanded":
                parameter = parameter.expand(x.shape)
            x = x + parameter
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


WAYS = ("two", "three", "views", "rows", "expanded", "blocks", "single", "tables")


def batches(rows):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(rows, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def made(way):
    torch.manual_seed(0)
    return Model(way).double()


def plain(way, rows):
    """The gradients of three micro-batches, each computed by itself: torch, too, adds one into another for "views"."""
    model = made(way)
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for x in batches(rows):
        gradients = torch.autograd.grad(model(x).pow(3).mean() / 3, list(named.values()))
        for name, gradient in zip(named, gradients, strict=True):
            total[name] += gradient
    return total


def ours(plan, options, rows, ways):
    results = {}
    for way in ways:
        if way == "single" and (options or plan != {"tp": 2}):
            continue  # it takes one sample
        accelerator = Accelerator("no", 3, plan=plan, options={"tensor": options}, cpu=True)
        model = made(way)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        index = accelerator.plan.layout.data_index(accelerator.process_index)
        width = accelerator.plan.layout.width
        for x in batches(rows * width):
            x = x.chunk(width)[index]
            with accelerator.accumulate(model):
                if plan.get("pp"):
                    accelerator.forward_backward(model, (x, x), lambda output, _: output.pow(3).mean())
                else:
                    accelerator.backward(model(x).pow(3).mean())
                optimizer.step()
                optimizer.zero_grad()
        after = accelerator.get_state_dict(model)
        results[way] = {name: before[name] - after[name] for name in before}
    return results


ON_FOUR = [({"tp": 2, "pp": 2}, {}, 2), ({"tp": 2, "shard": 2}, {}, 1), ({"tp": 2, "replicate": 2}, {}, 1)]


@pytest.mark.parametrize(
    ("plan", "options", "rows"),
    [
        ({"tp": 2}, {}, 1),
        ({"tp": 3}, {"sequence": True}, 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (({"tp": 2}, {}, 2), *ON_FOUR)),
    ],
)
def test_each_parameter_gets_its_own_gradient(plan, options, rows):
    check(plan, options, rows, WAYS)


@pytest.mark.parametrize(("case", "ways"), [*zip(ON_FOUR, (WAYS[0::3], WAYS[1::3], WAYS[2::3]), strict=True)])
def test_so_it_does_beside_another_axis_in_some_of_the_ways(case, ways):
    check(*case, ways)


def check(plan, options, rows, ways):
    size = 1
    for ranks in plan.values():
        size *= ranks
    total = rows * plan.get("shard", 1) * plan.get("replicate", 1)
    for results in run_ranks(ours, size, args=(plan, options, rows, ways)):
        for way, gradients in results.items():
            for name, want in plain(way, total).items():
                torch.testing.assert_close(
                    gradients[name], want, rtol=0, atol=1e-12, msg=lambda text, place=(way, name): f"{place}: {text}"
                )
