"""Optimizers go on with the states of a checkpoint of plain PyTorch, loaded before `prepare` or afterwards.

They may also be prepared again, after `clear`, and give their states to the optimizer of a copy.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from pairwise import pairs_by_day
from parity_models import GPT, loss_of
from shared_ranks import run_ranks

from paceline import Accelerator

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
