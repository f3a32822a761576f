"""Loops that compute with parameters outside of passes, beside whole tensors: the numbers of one process under every plan
that divides parameters or gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.testing import run_ranks

ROWS = 23  # batches of 12 and 11: the ranks' losses weigh unequally in the second


class Net(nn.Module):
    """Its first layer has 5 rows, which 2 ranks divide unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


class Loop:
    """One script: what it does in each step is the method that is called."""

    def __init__(self, plan) -> None:
        torch.manual_seed(0)
        model = Net().double()
        self.whole = copy.deepcopy(model)
        options = {"tensor": {"plan": {"encoder": "colwise_gather"}}} if plan and "tp" in plan else {}
        self.accelerator = Accelerator(cpu=True, split_batches=True, plan=plan, options=options)
        x = torch.randn(ROWS, 4, dtype=torch.float64)
        batches = DataLoader(TensorDataset(x, torch.arange(ROWS) % 5), 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(model, optimizer, batches)
        self.inner = self.accelerator.unwrap_model(self.model)
        self.numbers: list[float] = []

    def train(self, before=lambda: 0.0, between=lambda: 0.0, after=lambda: None) -> None:
        for x, y in self.batches:
            penalty = before()
            loss = F.cross_entropy(self.model(x), y)
            loss = loss + penalty + between()
            self.accelerator.backward(loss)
            self.numbers.append(sum(p.grad.pow(2).sum() for p in self.inner.parameters()).item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            after()

    def values(self) -> list[float]:
        state = self.accelerator.get_state_dict(self.model)
        weights = torch.cat([value.flatten() for value in state.values()])
        whole = torch.cat([value.detach().flatten() for value in self.whole.parameters()])
        return [*self.numbers, *weights.tolist(), *whole.tolist()]


def lookahead(loop: Loop) -> None:
    slow = [p.data.clone() for p in loop.inner.parameters()]

    def after() -> None:
        for p, q in zip(loop.inner.parameters(), slow, strict=True):
            q.lerp_(p.data, 0.5)
            p.data.copy_(q)

    loop.train(after=after)


def lookahead_by_a_copy(loop: Loop) -> None:
    def after() -> None:
        for p, q in zip(loop.inner.parameters(), loop.whole.parameters(), strict=True):
            q.data.lerp_(p.data, 0.5)
            p.data.copy_(q.data)

    loop.train(after=after)


def soft_target(loop: Loop) -> None:
    def after() -> None:
        for p, q in zip(loop.inner.parameters(), loop.whole.parameters(), strict=True):
            q.data.mul_(0.9).add_(p.data, alpha=0.1)
        with torch.no_grad():
            for p, q in zip(loop.inner.parameters(), loop.whole.parameters(), strict=True):
                q.copy_(0.9 * q + 0.1 * p)
        torch._foreach_lerp_(list(loop.whole.parameters()), list(loop.inner.parameters()), 0.1) if False else None

    loop.train(after=after)


def elastic(loop: Loop) -> None:
    old = {name: value.detach().clone() for name, value in loop.whole.named_parameters()}
    fisher = {name: value.square() + 0.1 for name, value in old.items()}

    def penalty() -> Tensor:
        return sum(
            ((p - old[name]) ** 2 * fisher[name]).sum() for name, p in loop.inner.named_parameters()
        ) + 0.1 * sum(p.pow(2).sum() for p in loop.inner.parameters())

    loop.train(before=penalty)
    loop.train(between=penalty)


def squares(loop: Loop) -> None:
    loop.train(before=lambda: 0.1 * sum(p.pow(2).sum() for p in loop.inner.parameters()))
    loop.train(before=lambda: 0.1 * sum(p.norm() for p in loop.inner.parameters()))
    loop.train(before=lambda: 0.1 * sum(p.abs().mean() for p in loop.inner.parameters()))


def orthogonal(loop: Loop) -> None:
    def penalty() -> Tensor:
        w = loop.inner.encoder.weight
        return 0.1 * (w.T @ w - torch.eye(4, dtype=torch.float64)).pow(2).sum()

    loop.train(before=penalty)
    loop.train(between=penalty)


def children(loop: Loop) -> None:
    for x, y in loop.batches:
        hidden = torch.tanh(loop.inner.encoder(x))
        loop.accelerator.backward(F.cross_entropy(loop.inner.head(hidden), y))
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def gradients_by_hand(loop: Loop) -> None:
    velocity = [torch.zeros_like(p) for p in loop.whole.parameters()]
    for x, y in loop.batches:
        loop.accelerator.backward(F.cross_entropy(loop.model(x), y))
        with torch.no_grad():
            for p, v in zip(loop.inner.parameters(), velocity, strict=True):
                v.mul_(0.9).add_(p.grad)
                p -= 0.1 * v
        loop.optimizer.zero_grad()


PROGRAMS = {each.__name__: each for each in (lookahead, lookahead_by_a_copy, soft_target, elastic, squares, orthogonal, children, gradients_by_hand)}
PLANS = [(2, {"shard": 2}), (2, {"shard": 2, "zero": 2}), (2, {"tp": 2}), (4, {"tp": 2, "shard": 2})]


def run_all(plan, names=tuple(PROGRAMS)):
    outcomes = {}
    for name in names:
        loop = Loop(plan)
        try:
            PROGRAMS[name](loop)
            outcomes[name] = loop.values()
        except Exception as error:
            import traceback
            outcomes[name] = "".join(traceback.format_exception(error)[-6:])
        loop.accelerator.free_memory()
    return outcomes


@pytest.mark.parametrize(("width", "plan"), PLANS, ids=str)
def test_as_on_one_process(width, plan):
    (expected,) = run_ranks(run_all, 1, args=(None,))
    for outcome in run_ranks(run_all, width, args=(plan,)):
        for name, numbers in expected.items():
            assert not isinstance(outcome[name], str), (name, outcome[name])
            assert outcome[name] == pytest.approx(numbers, rel=1e-9), name
