"""Layers that depend on the whole batch, or change by it: the numbers of one process, and replicas that never differ."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from torch import nn
from torch_sweep.modules import BATCH_LAYERS
from torch_sweep.runs import DATA_PARALLEL, PLANS, sweep

from paceline import Accelerator


@pytest.mark.parametrize("plan", DATA_PARALLEL)
def test_each_has_the_numbers_of_one_process(plan) -> None:
    assert set(sweep([(case, plan) for case in BATCH_LAYERS], 3).values()) == {"synchronised"}


class Seen(nn.Linear):
    """Keeps the largest input that it has seen, and an average of its outputs in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.center = torch.zeros(1)
        self.last = torch.zeros(())  # is an output, with a gradient
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("table", torch.ones(4))  # which nothing changes

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.detach().max())
        output = super().forward(x)
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        self.last = output.sum()
        return output


def observe(plan, options=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Seen()))
    accelerator = Accelerator(cpu=True, plan=PLANS[plan].settings(2), options=options)
    seen = model[1][0]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        x = torch.full((2, 3), 1.0 + dist.get_rank() + step)
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    lines = [line for line in accelerator.plan.explain().splitlines() if "buffers(" in line or "attributes(" in line]
    return seen.largest.item(), lines


@pytest.mark.parametrize("plan", DATA_PARALLEL)
def test_buffers_that_a_forward_pass_changes_are_named_and_those_of_rank_0(plan) -> None:
    (first, lines), (second, _) = run_ranks(observe, 2, args=(plan,))
    assert first == second
    line, of_attributes = lines
    assert "buffers(Sequential) = 1.0 (Seen)" in line and "seen in the first pass" in line
    assert "those of rank 0" in line
    assert "attributes(Sequential) = 1.0.center  <-" in of_attributes


@pytest.mark.parametrize(("plan", "strategy"), [("replicate", "replicate"), ("zero 2", "zero"), ("shard", "shard")])
def test_buffers_stay_with_each_rank_where_an_option_says_so(plan, strategy) -> None:
    options = {strategy: {"broadcast_buffers": False}}
    (first, lines), (second, _) = run_ranks(observe, 2, args=(plan, options))
    assert first < second
    line, _ = lines
    assert "keeps its own" in line


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, max_norm=0.1)

    def forward(self, words):
        return self.table(words).sum((1, 2))


def apart(plan):
    """Passes of one rank alone, which would wait for ever if they communicated, and the weights after them."""
    torch.manual_seed(0)
    net = Words()
    accelerator = Accelerator(cpu=True, plan=PLANS[plan].settings(2))
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    words = torch.tensor([[0, 1]]) + 2 * dist.get_rank()
    with accelerator.join_uneven_inputs([model]):
        for _ in range(1 + dist.get_rank()):
            accelerator.unwrap_model(model)(words)
    net.eval()
    lengths = 0.0
    if dist.get_rank() == 0:
        lengths = net.table(words).norm(dim=-1).max().item()
        deepcopy(net).train()(words)
    return lengths, net.table.weight.detach().clone()


@pytest.mark.parametrize("plan", ["replicate", "zero 2"])
def test_evaluation_and_uneven_steps_change_no_weight_and_wait_for_nobody(plan) -> None:
    torch.manual_seed(0)
    first = Words().table.weight
    (longest, weight), (_, other) = run_ranks(apart, 2, args=(plan,))
    assert longest <= 0.1 + 1e-6
    assert torch.equal(weight, other) and torch.equal(weight, first)
