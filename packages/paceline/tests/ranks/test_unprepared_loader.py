"""A training loop over a loader that was never prepared is told once; loops that divide their samples themselves are not."""

import logging

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from paceline import Accelerator
from paceline.testing import run_ranks

DATA = TensorDataset(torch.arange(12.0).unsqueeze(1))


class Stream(IterableDataset):
    def __iter__(self):
        return ((x,) for x in DATA.tensors[0][dist.get_rank() :: 2])


CASES = {
    "plain": lambda rank: DataLoader(DATA, 2, shuffle=True),
    "sampler": lambda rank: DataLoader(DATA, 2, sampler=DistributedSampler(DATA)),
    "part": lambda rank: DataLoader(Subset(DATA, range(rank, 12, 2)), 2),
    "own tensors": lambda rank: DataLoader(TensorDataset(DATA.tensors[0][rank::2]), 2),
    "stream": lambda rank: DataLoader(Stream(), 2),
    "prepared": lambda rank: DataLoader(DATA, 2),
}


def train():
    messages, warned = [], {}
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("paceline.data").addHandler(handler)
    for case, make in CASES.items():
        accelerator = Accelerator(cpu=True)
        net = torch.nn.Linear(1, 1)
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4))
        batches = make(accelerator.process_index)
        held_out = iter(DataLoader(DATA, 2))  # under way, but nothing is trained on it
        if case == "prepared":
            batches = accelerator.prepare(batches)
        for (x,) in batches:
            accelerator.backward(net(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        next(held_out)
        dist.barrier()
        warned[case] = [message for message in messages if "was not prepared" in message]
        messages.clear()
    return warned


def test_only_a_plain_loader_is_told_and_by_its_name() -> None:
    first, second = run_ranks(train, world=2)
    (message,) = first.pop("plain")
    assert "test_unprepared_loader.py:" in message
    assert "each of the 2 processes reads all of its samples" in message
    assert "`batches = accelerator.prepare(batches)`" in message
    assert not any(first.values()) and not any(second.values()), first
