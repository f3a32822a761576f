"""Optimizers go on with the states of a checkpoint of plain PyTorch, loaded before `prepare` or afterwards.

They may also be prepared again, after `clear`, give their states to the optimizer of a copy, and get parameters in mid-run.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from loops.zoo import Block, ListedMixture, StackedMixture
from pairwise import pairs_by_day
from parity_models import GPT, loss_of
from shared_ranks import run_ranks
from torch import nn

from paceline import Accelerator
from paceline.optim import Muon

KINDS = {
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "whole matrices": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}
PLANS = [{"replicate": 2}, {"zero": 1, "shard": 2}, {"zero": 2, "shard": 2}, {"shard": 2}, {"tp": 2}, {"pp": 2}]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 24, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def started(kind):
    """A model and an optimizer after two steps in plain PyTorch."""
    torch.manual_seed(0)
    model = GPT(layers=2).double()
    optimizer = KINDS[kind](model)
    for step in range(2):
        plain_step(model, optimizer, step)
    return model, optimizer


def plain_step(model, optimizer, step):
    inputs, targets = batch(step)
    loss_of(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def prepared(kind, plan, how):
    accelerator = Accelerator("no", cpu=True, split_batches=True, plan=plan)
    model, optimizer = started(kind)
    if how == "after":
        weights, states = model.state_dict(), optimizer.state_dict()
        model = GPT(layers=2).double()
        model, optimizer = accelerator.prepare(model, KINDS[kind](model))
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        assert set(optimizer.state) <= {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return accelerator, model, optimizer
    if how == "copied":
        trained, given = accelerator.prepare(model, optimizer)
        model = GPT(layers=2).double()
        model.load_state_dict(accelerator.get_state_dict(trained))
        optimizer = KINDS[kind](model)
        optimizer.load_state_dict(given.state_dict())
    elif how == "again":
        accelerator.prepare(model, optimizer)
        accelerator.clear()
    elif torch.distributed.is_initialized() and torch.distributed.get_rank():
        for state in optimizer.state.values():
            for value in state.values():
                value.add_(1)  # all ranks get the states of rank 0
    return accelerator, *accelerator.prepare(model, optimizer)


def go_on(kind, plan, how):
    accelerator, model, optimizer = prepared(kind, plan, how)
    for step in range(2, 4):
        # All ranks compute the whole batch, so the mean over ranks is its gradient.
        if "pp" in plan:
            accelerator.forward_backward(model, batch(step), loss_of)
        else:
            inputs, targets = batch(step)
            accelerator.backward(loss_of(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}


def is_whole(kind, plan, how):
    """Whether the states of a prepared optimizer, for its copy, are those of all parameters."""
    divides_parameters = "pp" in plan or (kind == "whole matrices" and plan != {"replicate": 2})
    return how != "copied" or not divides_parameters


WAYS = ["before", "after", "again", "copied"]
CASES = [case for case in product(KINDS, PLANS, WAYS) if is_whole(*case)]


@pytest.mark.parametrize(("kind", "plan", "how"), pairs_by_day(CASES), ids=str)
def test_they_go_on(kind, plan, how):
    model, optimizer = started(kind)
    for step in range(2, 4):
        plain_step(model, optimizer, step)
    want = {name: value.tolist() for name, value in model.state_dict().items()}
    for weights in run_ranks(go_on, 2, args=(kind, plan, how)):
        for name, values in weights.items():
            if name.endswith("k_proj.bias"):
                continue  # its gradient is zero but for rounding, which Adafactor scales to one
            torch.testing.assert_close(torch.tensor(values), torch.tensor(want[name]), rtol=0, atol=1e-9, msg=name)


# -- parameters that an optimizer gets in mid-run --------------------------------------------------------------------------


class Mixtures(nn.Module):
    """Two blocks with experts, whose weights are stacked or in a list, and a head: [rows, 4] -> [rows, 4]."""

    def __init__(self, listed):
        super().__init__()
        mixture = ListedMixture if listed else StackedMixture
        self.blocks = nn.ModuleList(nn.Sequential(Block(), mixture()) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithInner(torch.optim.Optimizer):
    """Steps through another optimizer, with which it shares the list of its groups, as SAM does."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


# What comes late, with the steps before `prepare`: experts; a head; a head that has states, and is frozen in `prepare`.
LATE = {"experts": 0, "head": 2, "frozen": 2}
MID_RUN_PLANS = {
    "zero 1": {"shard": 2, "zero": 1},
    "shard": {"shard": 2},
    "ep": {"ep": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}
MID_RUN_CASES = [
    (kind, plan, late, offload)
    for kind, plan, late, offload in product(
        ["AdamW", "Muon", "inner"], MID_RUN_PLANS, LATE, ["no", "optimizer", "disk"]
    )
    # States on disk are stepped part by part.
    if offload != "disk" or kind == "AdamW"
]


class MidRun:
    """A run that gives its optimizer parameters in mid-run; in plain PyTorch without an accelerator."""

    def __init__(self, kind, late, accelerator=None):
        torch.manual_seed(0)
        self.kind, self.late, self.accelerator = kind, late, None
        self.model = self.inner = model = Mixtures(listed=kind == "AdamW").double()
        parts = {
            "experts": [model.head, *(block[0] for block in model.blocks)],
            "head": [model.blocks],
            "frozen": [model.blocks, model.head],
        }
        first = nn.ModuleList(parts[late])
        makers = {
            "AdamW": lambda: torch.optim.AdamW(first.parameters(), lr=0.01, eps=1e-4),
            "Muon": lambda: Muon(first, eps=1e-4),
            "inner": lambda: WithInner(first.parameters()),
        }
        self.optimizer = makers[kind]()
        self.train(range(-LATE[late], 0))
        model.head.requires_grad_(late != "frozen")
        if accelerator is not None:
            self.accelerator = accelerator
            self.model, self.optimizer = accelerator.prepare(model, self.optimizer)
            self.inner = accelerator.unwrap_model(self.model)

    def add(self):
        if self.late == "frozen":
            self.inner.head.requires_grad_(True)
            return
        group = {"params": [value for name, value in self.inner.named_parameters() if self.late in name]}
        if self.kind == "Muon":  # AdamW steps them
            group |= {"elementwise": True, "lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-4}
        self.optimizer.add_param_group(group)

    def train(self, numbers):
        for number in numbers:
            rows = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(number + 9), dtype=torch.float64)
            if self.accelerator is None:
                mean_square(self.model(rows[0]), rows[1]).backward()
            else:
                layout, rank = self.accelerator.plan.layout, self.accelerator.process_index
                x, y = rows.chunk(layout.width, 1)[layout.data_index(rank)]
                self.accelerator.forward_backward(self.model, (x, y), mean_square)
            self.optimizer.step()
            self.optimizer.zero_grad()


def mean_square(output, y):
    return (output - y).square().mean()


def in_mid_run(kind, plan, late, offload, folder):
    """Weights after a run, and after one that has gone on from its checkpoint."""
    settings = {**MID_RUN_PLANS[plan], "offload": f"optimizer=disk:{folder}" if offload == "disk" else offload}
    options = {"offload": {"part_mb": 0.0002} if offload == "disk" else {"always": True}}
    weights = []
    for goes_on in (False, True):
        accelerator = Accelerator("no", cpu=True, plan=settings, options=options)
        run = MidRun(kind, late, accelerator)
        if goes_on:
            run.add()
            accelerator.load_state(folder / "saved")
        else:
            run.train([0])
            run.add()
            run.train([1, 2])
            accelerator.save_state(folder / "saved")
        run.train([3])
        weights.append(accelerator.get_state_dict(run.model) or {})
        accelerator.free_memory()
    return weights


@pytest.mark.parametrize(("kind", "plan", "late", "offload"), pairs_by_day(MID_RUN_CASES), ids=str)
def test_parameters_that_come_in_mid_run(kind, plan, late, offload, tmp_path):
    plain = MidRun(kind, late)
    plain.train([0])
    plain.add()
    plain.train([1, 2, 3])
    want = plain.model.state_dict()
    for weights in run_ranks(in_mid_run, 2, args=(kind, plan, late, offload, tmp_path)):
        for got in weights:
            for name, value in got.items():
                torch.testing.assert_close(value, want[name], rtol=0, atol=1e-9)
