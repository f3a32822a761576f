"""The reduction of whole gradients: whoever computed the loss, however the model changed, ranks train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import Accelerator
from paceline.testing import run_ranks

Plan = dict[str, int]
ROWS = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.spare = nn.Linear(6, 2)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


class Large(nn.Module):
    """A parameter that travels alone, and two parameters whose gradients are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 40_000)
        self.one, self.two = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + (self.one.view(2, 4) + self.two.view(2, 4)).sum(0)
        return self.wide(shifted)[:, :2]


def batches(accelerator: Accelerator, count: int) -> Iterator[Tensor]:
    """Yields this rank's rows of batches that are the same on any number of ranks."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        batch = torch.randn(ROWS, 4, generator=generator)
        yield batch.chunk(accelerator.num_processes)[accelerator.process_index]


def prepared(plan: Plan | None, model: nn.Module, **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, plan=plan if plan and torch.distributed.is_initialized() else None, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return accelerator, *accelerator.prepare(model, optimizer)


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


# -- what a script may do ------------------------------------------------------------------------------------------------


def a_method(accelerator, model, optimizer):
    for x in batches(accelerator, 3):
        accelerator.backward(loss_of(model.encode(x)))
        optimizer.step()
        optimizer.zero_grad()


def parts_of_the_model(accelerator, model, optimizer):
    for x in batches(accelerator, 3):
        inner = accelerator.unwrap_model(model)
        accelerator.backward(loss_of(inner.head(inner.encode(x))))
        optimizer.step()
        optimizer.zero_grad()


def several_passes(accelerator, model, optimizer):
    for x in batches(accelerator, 3):
        loss = loss_of(model(x))
        accelerator.backward(loss, retain_graph=True)
        accelerator.backward(2 * loss)
        accelerator.backward(loss_of(model(2 * x)))
        optimizer.step()
        optimizer.zero_grad()


def frozen_and_unfrozen(accelerator, model, optimizer):
    for step, x in enumerate(batches(accelerator, 5)):
        model.body.requires_grad_(step not in (1, 2))
        model.head.requires_grad_(step != 3)
        accelerator.backward(loss_of(model(x)))
        optimizer.step()
        optimizer.zero_grad()


def other_branches(accelerator, model, optimizer):
    for step, x in enumerate(batches(accelerator, 4)):
        accelerator.backward(loss_of((model.spare if step % 2 else model.head)(model.encode(x))))
        optimizer.step()
        optimizer.zero_grad()


def a_layer_added(accelerator, model, optimizer):
    for step, x in enumerate(batches(accelerator, 4)):
        if step == 1:
            torch.manual_seed(5)
            model.added = nn.Linear(2, 2)
            optimizer.add_param_group({"params": model.added.parameters()})
        output = model(x)
        accelerator.backward(loss_of(model.added(output) if step else output))
        optimizer.step()
        optimizer.zero_grad()


def a_head_replaced(accelerator, model, optimizer):
    for step, x in enumerate(batches(accelerator, 4)):
        if step == 2:
            torch.manual_seed(5)
            model.head = nn.Linear(6, 2)
            optimizer.add_param_group({"params": model.head.parameters()})
        accelerator.backward(loss_of(model(x)))
        optimizer.step()
        optimizer.zero_grad()


def weights_tied(accelerator, model, optimizer):
    for step, x in enumerate(batches(accelerator, 4)):
        if step == 2:
            model.spare.weight = model.head.weight
        accelerator.backward(loss_of(model(x)) + loss_of(model.spare(model.encode(x))))
        optimizer.step()
        optimizer.zero_grad()


def gradients_kept(accelerator, model, optimizer):
    """Gradients of two losses are combined by hand; the first are kept while the second are computed."""
    for x in batches(accelerator, 3):
        accelerator.backward(loss_of(model(x)))
        first = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(-x)))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), first, strict=True):
                if gradient is not None:
                    parameter.grad += 0.5 * gradient
        optimizer.step()
        optimizer.zero_grad()


def gradients_not_cleared(accelerator, model, optimizer):
    for step, x in enumerate(batches(accelerator, 4)):
        accelerator.backward(loss_of(model(x)))
        optimizer.step()
        if step == 1:
            optimizer.zero_grad(set_to_none=False)


def reentrant_recomputation(accelerator, model, optimizer):
    for x in batches(accelerator, 3):
        hidden = checkpoint(model.encode, x.requires_grad_(), use_reentrant=True)
        hidden = hidden + checkpoint(model.encode, 2 * x, use_reentrant=True)
        accelerator.backward(loss_of(model.head(hidden)))
        optimizer.step()
        optimizer.zero_grad()


def hooks_that_step(accelerator, model, optimizer):
    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
    for x in batches(accelerator, 3):
        accelerator.backward(loss_of(model(x)))
    for handle in handles:
        handle.remove()
    for x in batches(accelerator, 1):
        accelerator.backward(loss_of(model(x)))
        optimizer.step()
        optimizer.zero_grad()


def held(accelerator, model, optimizer):
    for step, x in enumerate(batches(accelerator, 4)):
        if step % 2 == 0:
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model.spare(model.encode(x))) / 2)
        else:
            accelerator.backward(loss_of(model(x)) / 2)
            optimizer.step()
            optimizer.zero_grad()


def a_failed_pass(accelerator, model, optimizer):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError

    for x in batches(accelerator, 2):
        with pytest.raises(ArithmeticError):
            accelerator.backward(loss_of(model.head(Fails.apply(model.encode(x)))))
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(x)))
        optimizer.step()
        optimizer.zero_grad()


def by_an_unprepared_optimizer(accelerator, model, optimizer):
    """A plain backward pass ends with averaged gradients, too."""
    for x in batches(accelerator, 3):
        loss_of(model(x)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


PROGRAMS = [
    a_method, parts_of_the_model, several_passes, frozen_and_unfrozen, other_branches, a_layer_added, a_head_replaced,
    weights_tied, gradients_kept, gradients_not_cleared, reentrant_recomputation, hooks_that_step, held, a_failed_pass,
    by_an_unprepared_optimizer,
]  # fmt: skip
NOT_UNDER_ROWS = {
    gradients_kept: "gradients are DTensors",
    by_an_unprepared_optimizer: "gradients are DTensors",
    hooks_that_step: "gradients are DTensors",
    gradients_not_cleared: "zero=2 adds rows of earlier windows: checked in test_zero",
}
PLANS: list[Plan | None] = [None, {"shard": -1, "zero": 1}, {"shard": -1, "zero": 2}]


def run_all(plan: Plan | None, programs: list[Callable[..., None]]) -> dict[str, Any]:
    """Runs each program on a model of its own, and returns the parameters afterwards."""
    torch.set_default_dtype(torch.float64)
    outcomes: dict[str, Any] = {}
    for program in programs:
        torch.manual_seed(0)
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        chosen = {name: world if size < 0 else size for name, size in (plan or {}).items()}
        accelerator, model, optimizer = prepared(chosen, Net())
        try:
            program(accelerator, model, optimizer)
            outcomes[program.__name__] = [parameter.detach().clone() for parameter in model.parameters()]
        except Exception as error:
            outcomes[program.__name__] = f"{type(error).__name__}: {error}"
        accelerator.free_memory()
    return outcomes


def compare(expected: dict[str, Any], outcomes: list[dict[str, Any]]) -> list[str]:
    problems = []
    for name, tensors in expected.items():
        assert not isinstance(tensors, str), f"{name} on one process: {tensors}"
        for rank, outcome in enumerate(outcomes):
            got = outcome[name]
            if isinstance(got, str):
                problems.append(f"{name} on rank {rank}: {got}")
            else:
                off = max(float((a - b).abs().max()) for a, b in zip(tensors, got, strict=True))
                if off > 1e-9:
                    problems.append(f"{name} on rank {rank}: off by {off}")
    return problems


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", PLANS, ids=["replicate", "zero 1", "zero 2"])
def test_programs_train_as_on_one_process(plan: Plan | None, world: int) -> None:
    programs = [program for program in PROGRAMS if not (plan and plan["zero"] == 2 and program in NOT_UNDER_ROWS)]
    if plan and plan["zero"] == 1:
        # These step without the optimizer whose states are divided.
        programs = [each for each in programs if each not in (hooks_that_step, by_an_unprepared_optimizer)]
    (expected,) = run_ranks(run_all, 1, args=(None, programs))
    assert compare(expected, run_ranks(run_all, world, args=(plan, programs))) == []
