"""A model that was never prepared is told once, where each process would train one of its own; one that differs is refused."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import Accelerator, PlanError
from paceline.testing import run_ranks


def _messages(case):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("paceline.optim").addHandler(handler)
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    torch.manual_seed(rank if case == "other weights" else 0)
    net = nn.Linear(4, 2)
    other = nn.Linear(4, 4)
    if case == "own DDP":
        net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if case == "prepared":
        net, optimizer = accelerator.prepare(net, optimizer)
    elif case == "another accelerator":
        # Its gradients are divided among the ranks, so they differ.
        another = Accelerator(cpu=True, plan={"zero": 2})
        net, optimizer = another.prepare(net, optimizer)
    elif case == "one of two":
        other = accelerator.prepare(other)
    data = torch.randn(4, 4, generator=torch.Generator().manual_seed(0 if case == "same data" else rank))
    for _ in range(4):
        loss = net(other(data)).square().mean()
        (another if case == "another accelerator" else accelerator).backward(loss)
        if case == "clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
    return messages


@pytest.mark.parametrize("case", ["forgotten", "clipped", "one of two"])
def test_it_is_told_where_gradients_differ(case):
    (message,), others = run_ranks(_messages, world=2, args=(case,))
    assert "test_unprepared_model.py:" in message and "each process trains a model of its own" in message
    assert "`model, optimizer = accelerator.prepare(model, optimizer)`" in message
    assert others == []


@pytest.mark.parametrize("case", ["prepared", "another accelerator", "own DDP", "same data", "other weights"])
def test_nothing_is_said_of_what_is_right_or_meant(case):
    assert run_ranks(_messages, world=2, args=(case,)) == [[], []]


def _prepared(case, plan):
    accelerator = Accelerator(cpu=True, plan=plan)
    rank = accelerator.process_index
    net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))
    if case == "another shape" and rank == 2:
        net[1] = nn.Linear(2, 4)
    elif case == "fewer parameters" and rank == 1:
        del net[1]
    elif case == "frozen on one rank" and rank == 1:
        net[0].bias.requires_grad_(False)
    elif case == "only evaluated":
        net = nn.Linear(1, 1 + rank).requires_grad_(False)
    try:
        accelerator.prepare(net)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "plan", "why"),
    [
        ("another shape", {"zero": 3}, "rank 0 has 1.weight of Sequential with the shape [3, 2] (float32, trained), rank 2 has "
         "1.weight of Sequential with the shape [4, 2] (float32, trained)"),
        ("fewer parameters", None, "rank 1 has no more parameters"),
        ("frozen on one rank", None, "rank 1 has 0.bias of Sequential with the shape [2] (float32, frozen)"),
        ("only evaluated", None, "rank 1 has weight of Linear with the shape [2, 1] (float32, frozen)"),
        ("the same", {"zero": 1}, ""),
    ],
)  # fmt: skip
def test_a_model_that_differs_on_another_rank_is_refused_on_all(case, plan, why):
    messages = run_ranks(_prepared, world=3, args=(case, plan))
    assert len(set(messages)) == 1 and why in messages[0]
    assert ("[model-differs]" in messages[0]) == bool(why)
