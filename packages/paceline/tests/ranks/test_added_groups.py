"""An optimizer that gets parameters of another model by `add_param_group`, in mid-run, steps them as one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import Accelerator
from paceline.testing import run_ranks

Plan = dict[str, int]
ROWS = 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class Normalised(torch.optim.Optimizer):
    """Looks at whole parameters: the step is the gradient over its norm, plus momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.5).add_(parameter.grad)
                parameter.sub_(group["lr"] * momentum / momentum.norm())


def batches(accelerator: Accelerator, count: int) -> Iterator[Tensor]:
    """Yields this rank's rows of batches that are the same on any number of ranks."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        batch = torch.randn(ROWS, 4, generator=generator)
        yield batch.chunk(accelerator.num_processes)[accelerator.process_index]


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def prepared(
    accelerator: Accelerator, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: float
) -> list[Any]:
    """Returns two models, the optimizer of the first one's body, and that of the second, which gets the first one's head."""
    torch.manual_seed(0)
    first, second = Net(), Net()
    own = kind(first.body.parameters(), lr=0.1, **options)
    other = kind(second.parameters(), lr=0.1, **options)
    return list(accelerator.prepare(first, second, own, other))


def add_head(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": accelerator.unwrap_model(model).head.parameters()})


def train(accelerator: Accelerator, objects: list[Any], count: int = 3) -> None:
    """Adds the head after the first step."""
    first, second, own, other = objects
    for step, x in enumerate(batches(accelerator, count)):
        if step == 1:
            add_head(accelerator, first, other)
        accelerator.backward(loss_of(first(x)) + loss_of(second(x)))
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()


# -- what a script may do ------------------------------------------------------------------------------------------------


def held_back_and_cleared(accelerator: Accelerator, objects: list[Any]) -> None:
    first, second, own, other = objects
    add_head(accelerator, first, other)
    for x in batches(accelerator, 3):
        with accelerator.no_sync(first, second):
            accelerator.backward(loss_of(first(x)) + loss_of(second(x)))
        for optimizer in (own, other):
            optimizer.zero_grad()
        accelerator.backward(loss_of(first(-x)) + loss_of(second(-x)))
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()


def kept_and_cleared(accelerator: Accelerator, objects: list[Any]) -> None:
    """Gradients of one pass are cleared after they were reduced, and before the next pass."""
    first, second, own, other = objects
    add_head(accelerator, first, other)
    for x in batches(accelerator, 3):
        accelerator.backward(loss_of(first(x)) + loss_of(second(x)))
        accelerator.backward(loss_of(first(2 * x)) + loss_of(second(x)))
        for optimizer in (own, other):
            optimizer.zero_grad()
        accelerator.backward(loss_of(first(-x)) + loss_of(second(-x)))
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()


def by_the_plain_optimizer(accelerator: Accelerator, objects: list[Any]) -> None:
    """The group is added to the optimizer inside of the prepared one."""
    first, second, own, other = objects
    held_back_and_cleared(accelerator, [first, second, own, _Plain(other)])


class _Plain:
    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared

    def add_param_group(self, group: dict[str, Any]) -> None:
        self._prepared.optimizer.add_param_group(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prepared, name)


def a_pass_before_the_step(accelerator: Accelerator, objects: list[Any]) -> None:
    """A forward pass between backward pass and step, whose loss nobody uses, leaves nothing of before the step behind."""
    first, second, own, other = objects
    add_head(accelerator, first, other)
    for x in batches(accelerator, 3):
        accelerator.backward(loss_of(first(x)) + loss_of(second(x)))
        first(x)
        for optimizer in (other, own):
            optimizer.step()
            optimizer.zero_grad()


def a_step_of_the_other_alone(accelerator: Accelerator, objects: list[Any]) -> None:
    first, second, own, other = objects
    add_head(accelerator, first, other)
    for x in batches(accelerator, 3):
        accelerator.backward(loss_of(first(x)) + loss_of(second(x)))
        first(x)
        other.step()
        other.zero_grad()
        own.zero_grad()


def a_new_layer(accelerator: Accelerator, objects: list[Any]) -> None:
    """A layer of the first model, which no strategy has seen, is trained by the optimizer of the second."""
    first, second, own, other = objects
    torch.manual_seed(5)
    accelerator.unwrap_model(first).extra = extra = nn.Linear(2, 2)
    other.add_param_group({"params": extra.parameters()})
    for x in batches(accelerator, 3):
        accelerator.backward(loss_of(extra(first(x))) + loss_of(second(x)))
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()


def added_during_a_pass(accelerator: Accelerator, objects: list[Any]) -> None:
    """Between forward and backward pass, when a plan that divides parameters has gathered them."""
    first, second, own, other = objects
    for step, x in enumerate(batches(accelerator, 3)):
        if step:
            with accelerator.no_sync(first, second):
                accelerator.backward(loss_of(first(x)) + loss_of(second(x)))
            for optimizer in (own, other):
                optimizer.zero_grad()
        loss = loss_of(first(-x)) + loss_of(second(-x))
        if step == 0:
            head = accelerator.unwrap_model(first).head
            other.add_param_group({"params": head.weight})
            other.add_param_group({"params": iter([head.bias])})
        accelerator.backward(loss)
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()


def saved(accelerator: Accelerator, objects: list[Any]) -> None:
    """The states of a group that was added go into the state dict and back."""
    train(accelerator, objects)
    other = objects[3]
    other.load_state_dict(other.state_dict())
    train_again = [*objects[:3], _NoGroup(other)]
    train(accelerator, train_again)


class _NoGroup(_Plain):
    def add_param_group(self, group: dict[str, Any]) -> None:
        pass


PROGRAMS: list[Callable[[Accelerator, list[Any]], None]] = [
    train, held_back_and_cleared, kept_and_cleared, by_the_plain_optimizer, a_pass_before_the_step, a_step_of_the_other_alone,
    a_new_layer, added_during_a_pass, saved,
]  # fmt: skip
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.5}),
    "AdamW": (torch.optim.AdamW, {}),
    "Normalised": (Normalised, {}),
}
PLANS: dict[str, Plan] = {
    "replicate": {},
    "zero 1": {"shard": 2, "zero": 1},
    "zero 2": {"shard": 2, "zero": 2},
    "shard": {"shard": 2},
}


def cases_of(plan: str) -> list[tuple[Callable[[Accelerator, list[Any]], None], str]]:
    """Each program with one kind of optimizer, in turn; the first plan without division has all."""
    names = list(KINDS)
    cases = []
    for number, program in enumerate(PROGRAMS):
        place = number + list(PLANS).index(plan)
        kinds = names if plan == "replicate" else [names[place % len(names)]]
        cases += [(program, name) for name in kinds]
    return cases


def run_all(name_of_plan: str, plan: Plan) -> dict[str, Any]:
    """Runs each program, and returns the parameters afterwards."""
    torch.set_default_dtype(torch.float64)
    outcomes: dict[str, Any] = {}
    for program, name in cases_of(name_of_plan):
        kind, options = KINDS[name]
        accelerator = Accelerator(cpu=True, plan=plan or None)
        objects = prepared(accelerator, kind, **options)
        case = f"{program.__name__} with {name}"
        try:
            program(accelerator, objects)
        except Exception as error:
            outcomes[case] = f"{type(error).__name__}: {error}"
        else:
            outcomes[case] = [value for model in objects[:2] for value in accelerator.get_state_dict(model).values()]
        accelerator.free_memory()
    return outcomes


@pytest.fixture(scope="module")
def on_one_process() -> dict[str, Any]:
    return run_ranks(run_all, 1, args=["replicate", {}])[0]


@pytest.mark.parametrize("plan", PLANS)
def test_parameters_of_another_model_train_as_on_one_process(plan: str, on_one_process: dict[str, Any]) -> None:
    outcomes = run_ranks(run_all, 2, args=[plan, PLANS[plan]])
    problems = []
    for program, kind in cases_of(plan):
        case = f"{program.__name__} with {kind}"
        expected = on_one_process[case]
        assert not isinstance(expected, str), f"{case} on one process: {expected}"
        for rank, outcome in enumerate(outcomes):
            got = outcome[case]
            if isinstance(got, str):
                problems.append(f"{case} on rank {rank}: {got}")
                continue
            off = max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
            if off > 1e-8:
                problems.append(f"{case} on rank {rank}: off by {off}")
    assert not problems, "\n".join(problems)
