"""A model that was never prepared is told once, where each process would train one of its own."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import Accelerator
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
