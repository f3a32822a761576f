"""Loops that compute with parameters and gradients outside of passes, alone and beside whole tensors: under every plan that
divides these, the numbers are those of one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import cache

import pytest
import torch
from shared_ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, PacelineError

ROWS = 23  # batches of 12 and 11, so that the ranks' losses weigh unequally in the second


class Net(nn.Module):
    """Two ranks divide the 5 rows of its head unevenly. Each layer is a unit of its own under `shard`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


class Loop:
    """A model that is prepared, a whole copy of it that is not, and what a program has to compare."""

    def __init__(self, plan: dict[str, int] | None) -> None:
        torch.manual_seed(0)
        model = Net().double()
        self.whole = copy.deepcopy(model)
        options = {}
        if plan and "tp" in plan:
            options["tensor"] = {"plan": {"encoder": "colwise_gather"}}
        if plan and plan.get("zero", 3) == 3 and "shard" in plan:
            options["shard"] = {"wrap": "Linear"}
        self.accelerator = Accelerator(cpu=True, split_batches=True, plan=plan, options=options)
        x = torch.randn(ROWS, 4, dtype=torch.float64)
        batches = DataLoader(TensorDataset(x, torch.arange(ROWS) % 5), 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.batches = self.accelerator.prepare(model, optimizer, batches)
        self.inner = self.accelerator.unwrap_model(self.model)
        self.numbers: list[float] = []

    def pairs(self):
        return zip(self.inner.parameters(), self.whole.parameters(), strict=True)

    def train(self, before=lambda: 0.0, between=lambda: 0.0, after=lambda: None) -> None:
        for x, y in self.batches:
            penalty = before()
            loss = F.cross_entropy(self.model(x), y) + penalty + between()
            self.accelerator.backward(loss)
            self.numbers.append(sum(p.grad.pow(2).sum() for p in self.inner.parameters()).item())
            self.step()
            after()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[float]:
        state = self.accelerator.get_state_dict(self.model)
        weights = torch.cat([value.flatten() for value in state.values()])
        whole = torch.cat([value.detach().flatten() for value in self.whole.parameters()])
        return [*self.numbers, *weights.tolist(), *whole.tolist()]


# -- averages and targets ------------------------------------------------------------------------------------------------


def lookahead(loop: Loop) -> None:
    slow = [p.data.clone() for p in loop.inner.parameters()]

    def after() -> None:
        for p, q in zip(loop.inner.parameters(), slow, strict=True):
            q.lerp_(p.data, 0.5)
            p.data.copy_(q)

    loop.train(after=after)


def lookahead_by_a_whole_copy(loop: Loop) -> None:
    def after() -> None:
        for p, q in loop.pairs():
            q.data.lerp_(p.data, 0.5)
            p.data.copy_(q.data)

    loop.train(after=after)


def soft_target(loop: Loop) -> None:
    def after() -> None:
        for p, q in loop.pairs():
            q.data.mul_(0.9).add_(p.data, alpha=0.1)
        with torch.no_grad():
            for p, q in loop.pairs():
                q.copy_(0.9 * q + 0.1 * p)

    loop.train(after=after)


def lists_of_tensors(loop: Loop) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(loop.whole.parameters()), list(loop.inner.parameters()), 0.1)
        torch._foreach_add_(list(loop.inner.parameters()), list(loop.whole.parameters()))
        torch.add(loop.whole.encoder.bias, 1.0, out=loop.inner.encoder.bias)


def average_that_is_not_prepared(loop: Loop) -> None:
    average = AveragedModel(loop.whole)
    average.update_parameters(loop.inner)
    loop.train()
    average.update_parameters(loop.inner)
    loop.whole = average.module


# -- penalties -----------------------------------------------------------------------------------------------------------


def elastic_weights(loop: Loop) -> None:
    old = {name: value.detach().clone() for name, value in loop.whole.named_parameters()}
    fisher = {name: value.square() + 0.1 for name, value in old.items()}

    def penalty() -> Tensor:
        distance = sum(((p - old[name]) ** 2 * fisher[name]).sum() for name, p in loop.inner.named_parameters())
        return distance + 0.1 * sum(p.pow(2).sum() for p in loop.inner.parameters())

    loop.train(before=penalty)
    loop.train(between=penalty)


def norms(loop: Loop) -> None:
    loop.train(before=lambda: 0.1 * sum(p.pow(2).sum() for p in loop.inner.parameters()))
    loop.train(before=lambda: 0.1 * sum(p.norm() for p in loop.inner.parameters()))
    loop.train(before=lambda: 0.1 * sum(p.abs().mean() for p in loop.inner.parameters()))


def orthogonal_rows(loop: Loop) -> None:
    def penalty() -> Tensor:
        weight = loop.inner.encoder.weight
        return 0.1 * (weight.T @ weight - torch.eye(4, dtype=torch.float64)).pow(2).sum()

    loop.train(before=penalty)
    loop.train(between=penalty)


def penalties_on_rows(loop: Loop) -> None:
    ones = torch.ones(2, 4, dtype=torch.float64)
    loop.train(before=lambda: 0.1 * loop.inner.encoder.weight[1:3].pow(2).mean())
    loop.train(before=lambda: 0.1 * (loop.inner.encoder.weight[1:3] - ones).pow(2).mean())
    loop.train(before=lambda: 0.1 * loop.inner.head.weight.flatten().norm())


def a_penalty_alone(loop: Loop) -> None:
    loop.accelerator.backward(sum(p.pow(2).mean() for p in loop.inner.parameters()))
    loop.step()


def a_penalty_with_items_and_clipping(loop: Loop) -> None:
    for x, y in loop.batches:
        penalty = 0.1 * sum((p - q).pow(2).mean() for p, q in loop.pairs())
        loss = F.cross_entropy(loop.model(x), y, reduction="sum")
        loop.accelerator.backward(loss + penalty * len(x), num_items=len(x))
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.5)
        loop.step()


def a_penalty_in_a_window(loop: Loop) -> None:
    old = [p.detach().clone() for p in loop.whole.parameters()]
    loop.accelerator.gradient_accumulation_steps = 2
    for x, y in loop.batches:
        with loop.accelerator.accumulate(loop.model):
            penalty = 0.1 * sum((p - q).pow(2).mean() for p, q in zip(loop.inner.parameters(), old, strict=True))
            loop.accelerator.backward(F.cross_entropy(loop.model(x), y) + penalty)
            loop.step()


# -- steps and passes by hand --------------------------------------------------------------------------------------------


def children_one_by_one(loop: Loop) -> None:
    for x, y in loop.batches:
        hidden = torch.tanh(loop.inner.encoder(x))
        loop.accelerator.backward(F.cross_entropy(loop.inner.head(hidden), y))
        loop.step()


def functions_of_weights(loop: Loop) -> None:
    for x, y in loop.batches:
        hidden = torch.tanh(F.linear(x, loop.inner.encoder.weight, loop.inner.encoder.bias))
        loop.accelerator.backward(F.cross_entropy(hidden @ loop.inner.head.weight.T + loop.inner.head.bias, y))
        loop.step()


def momentum_by_hand(loop: Loop) -> None:
    velocity = [torch.zeros_like(q) for q in loop.whole.parameters()]
    for x, y in loop.batches:
        loop.accelerator.backward(F.cross_entropy(loop.model(x), y))
        with torch.no_grad():
            for p, v in zip(loop.inner.parameters(), velocity, strict=True):
                v.mul_(0.9).add_(p.grad)
                p -= 0.1 * v
        loop.optimizer.zero_grad()


def gradients_by_grad(loop: Loop) -> None:
    """Each rank gets the gradient of its own loss, so all ranks take the same samples here."""
    x = torch.ones(3, 4, dtype=torch.float64)
    parameters = list(loop.inner.parameters())
    penalty = sum(p.pow(2).sum() for p in parameters)
    output = loop.model(x)
    # The parameters of before the pass, and those of now.
    for inputs in (parameters, list(loop.model.parameters())):
        for loss in (output.pow(2).mean(), output.exp().mean() + penalty):
            for gradient in torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True):
                if gradient is not None:
                    loop.numbers.append(gradient.norm().item())
    loop.accelerator.backward(output.mean())
    loop.step()


def hooks_under_grad(loop: Loop) -> None:
    """Hooks of parameters are called by `torch.autograd.grad`, too."""
    x = torch.ones(3, 4, dtype=torch.float64)
    parameters = list(loop.inner.parameters())
    for p in parameters:
        p.register_hook(lambda gradient: 3 * gradient)
    for _ in range(2):
        output = loop.model(x)
        for inputs in (parameters, list(loop.model.parameters())):
            gradients = torch.autograd.grad(output.pow(2).mean(), inputs, retain_graph=True)
            loop.numbers += [gradient.norm().item() for gradient in gradients]
        loop.accelerator.backward(output.pow(2).mean())
        loop.step()


def backward_for_some(loop: Loop) -> None:
    """Gradients of some parameters alone, which were taken before the pass or after it."""
    x = torch.ones(3, 4, dtype=torch.float64)
    taken = list(loop.optimizer.param_groups[0]["params"])
    for some in (taken, taken[2:], None):
        output = loop.model(x)
        inputs = list(loop.inner.head.parameters()) if some is None else some
        loop.accelerator.backward(output.pow(2).mean(), inputs=inputs)
        loop.numbers += [0.0 if p.grad is None else p.grad.norm().item() for p in loop.inner.parameters()]
        loop.step()


# -- reading and writing -------------------------------------------------------------------------------------------------


def writing_rows(loop: Loop) -> None:
    encoder, head = loop.inner.encoder, loop.inner.head
    encoder.weight.data[1:3] *= 2
    head.weight.data[:, 1:3] += 1
    head.weight.data[0].zero_()
    head.weight.detach()[4][2:].fill_(3.0)
    head.bias.data[2:] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    with torch.no_grad():
        encoder.weight[0] = 1.0
        encoder.weight[loop.whole.encoder.weight > 0.2] = 0.0
        encoder.bias.mul_(torch.tensor(0.5))
    head.weight.data.view(-1)[3] = 7.0
    encoder.weight.data.mul_((loop.whole.encoder.weight < 0.1).double())


def reading(loop: Loop) -> None:
    loop.train()
    weight = loop.inner.head.weight
    running = torch.zeros(1, dtype=torch.float64)
    running.lerp_(weight.detach().norm()[None], 0.1)
    flat = torch.cat([p.detach().flatten() for p in loop.inner.parameters()])
    loop.numbers += [
        *weight.tolist()[3],
        *weight.detach().numpy()[4].tolist(),
        float(f"{weight.norm():.6f}"),
        float(f"{weight.norm()}"),
        float(str(weight.detach().norm()).removeprefix("tensor(").split(",")[0]),
        running.item(),
        *nn.utils.parameters_to_vector(loop.inner.parameters()).tolist(),
        *flat.abs().topk(3).values.tolist(),
        *torch.linalg.svdvals(weight.detach()).tolist(),
        float(torch.allclose(weight, loop.whole.head.weight)),
    ]


def loading(loop: Loop) -> None:
    """A state of shards, some of which the script has replaced by whole tensors, and the same from a file of each rank."""
    loop.train()
    state = loop.model.state_dict()
    name = next(iter(state))
    state[name] = loop.whole.encoder.weight.detach() * 2
    loop.model.load_state_dict(state)
    file = io.BytesIO()
    torch.save(loop.model.state_dict(), file)
    loop.train()
    file.seek(0)
    loop.model.load_state_dict(torch.load(file))


PROGRAMS: dict[str, Callable[[Loop], None]] = {
    program.__name__: program
    for program in (
        lookahead, lookahead_by_a_whole_copy, soft_target, lists_of_tensors, average_that_is_not_prepared,
        elastic_weights, norms, orthogonal_rows, penalties_on_rows, a_penalty_alone, a_penalty_with_items_and_clipping,
        a_penalty_in_a_window, children_one_by_one, functions_of_weights, momentum_by_hand, gradients_by_grad, hooks_under_grad,
        backward_for_some,
        writing_rows, reading, loading,
    )
}  # fmt: skip
PLANS = [(2, {"shard": 2}), (2, {"shard": 2, "zero": 2}), (2, {"tp": 2}), (4, {"tp": 2, "shard": 2})]


def run_all(plan):
    outcomes = {}
    for name, program in PROGRAMS.items():
        loop = Loop(plan)
        try:
            program(loop)
            outcomes[name] = loop.values()
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        loop.accelerator.free_memory()
    return outcomes


@cache
def on_one_process():
    return run_ranks(run_all, 1, args=(None,))[0]


@pytest.mark.parametrize(("width", "plan"), PLANS, ids=str)
def test_as_on_one_process(width, plan):
    expected = on_one_process()
    wrong = {}
    for outcome in run_ranks(run_all, width, args=(plan,)):
        for name, numbers in expected.items():
            if outcome[name] != pytest.approx(numbers, rel=1e-9):
                wrong[name] = outcome[name]
    assert not wrong


class Apart(torch.optim.Optimizer):
    """It looks at whole matrices, and keeps gradients where nobody looks for the states of an optimizer."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.kept = []

    def keep(self):
        self.kept = [p.grad.clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self):
        for parameter, gradient in zip(self.param_groups[0]["params"], self.kept, strict=True):
            if parameter.grad is not None:
                parameter.sub_(gradient)


def codes_under(plan):
    loop = Loop(plan)
    x = torch.ones(3, 4, dtype=torch.float64)
    codes = []
    values = {name: value.detach() for name, value in loop.inner.named_parameters()}
    try:
        torch.func.functional_call(loop.inner, values, (x,))
    except PacelineError as error:
        codes.append(error.code)
    model = Net().double()
    model, optimizer = loop.accelerator.prepare(model, Apart(model.parameters()))
    loop.accelerator.backward(model(x).mean())
    optimizer.keep()
    try:
        optimizer.step()
    except PacelineError as error:
        codes.append(error.code)
    return codes


def test_what_cannot_be_whole_is_refused():
    assert run_ranks(codes_under, 2, args=({"shard": 2},)) == [["shard-functional-call", "optimizer-mixed"]] * 2
    assert run_ranks(codes_under, 2, args=({"shard": 2, "zero": 2},)) == [["optimizer-mixed"]] * 2
