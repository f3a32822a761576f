"""The reduction of whole gradients: whoever computed the loss, however the model changed, ranks train as one process does."""

from __future__ import annotations

import contextlib
import pickle
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


def a_plain_pass_before(accelerator, model, optimizer):
    """Its end has reduced its own gradients, and not those of the pass that follows."""
    for x in batches(accelerator, 3):
        loss_of(model(x)).backward()
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(x)))
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = [
    a_method, parts_of_the_model, several_passes, frozen_and_unfrozen, other_branches, a_layer_added, a_head_replaced,
    weights_tied, gradients_kept, gradients_not_cleared, reentrant_recomputation, hooks_that_step, held, a_failed_pass,
    by_an_unprepared_optimizer, a_plain_pass_before,
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


class Odd(nn.Module):
    """A sparse gradient, and gradients that lie in another order than rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)
        self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table((x.abs() * 2).long().clamp(max=7)).mean((1, 2))
        return rows[:, None] + self.convolution(x[:, None, None, :].expand(-1, 2, 2, -1)).mean((1, 2, 3))[:, None]


class Switching(nn.Module):
    """Each rank uses another part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.parts[part](x)


def on_other_models(plan: Plan | None) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    outcomes: dict[str, Any] = {}
    for kind in (Large, Odd):
        torch.manual_seed(0)
        accelerator, model, optimizer = prepared(plan, kind())
        for step, x in enumerate(batches(accelerator, 3)):
            with accelerator.no_sync(model) if step == 1 else contextlib.nullcontext():
                accelerator.backward(loss_of(model(x)))
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
        outcomes[kind.__name__] = [parameter.detach().clone() for parameter in model.parameters()]
        accelerator.free_memory()
    return outcomes


def test_large_sparse_and_strided_gradients() -> None:
    (expected,) = run_ranks(on_other_models, 1, args=(None,))
    assert compare(expected, run_ranks(on_other_models, 3, args=({"replicate": 3},))) == []


def test_each_rank_uses_other_parts_of_two_models() -> None:
    """The buckets of the two models are sent in another order on each rank."""

    def work() -> list[list[Tensor]]:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        models = accelerator.prepare(Switching(), Switching())
        rank = accelerator.process_index
        for step in range(4):
            first = models[rank % 2](torch.ones(2, 4), (rank + step) % 3)
            second = models[1 - rank % 2](torch.ones(2, 4), step % 3)
            loss = (first.sum() if rank != 1 or step != 2 else 0.0) + second.sum()
            accelerator.backward(loss)
        return [[parameter.grad for parameter in model.parameters()] for model in models]

    one, *others = run_ranks(work, 3)
    for other in others:
        for mine, theirs in zip(one, other, strict=True):
            for gradient, same in zip(mine, theirs, strict=True):
                assert (gradient is None) == (same is None)
                if gradient is not None:
                    torch.testing.assert_close(gradient, same, rtol=0, atol=0)


def test_one_rank_alone_may_evaluate_and_compute_gradients_of_inputs() -> None:
    def work() -> bool:
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, options={"batch_norm": {"statistics": "local"}})
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for x in batches(accelerator, 2):
            accelerator.backward(loss_of(model(x)))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            model.eval()
            with torch.no_grad():
                model(torch.ones(3, 4))
            inputs = torch.ones(3, 4, requires_grad=True)
            torch.autograd.grad(model(inputs).sum(), inputs)
            model.train()
        buffers = torch.cat([buffer.flatten().double() for buffer in model.buffers()])
        same = accelerator.gather(buffers[None])
        return bool((same == same[:1]).all())

    assert run_ranks(work, 2) == [True, True]


class Experts(nn.Module):
    """Each row has one of two layers, so that a rank may use one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        out = torch.zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


def frozen_in_the_middle_of_a_window(rows: Tensor, frozen: int | None, *, looks: bool) -> list[Tensor]:
    """Two micro-batches of four rows. Returns the weights after the step.

    Args:
        frozen: the expert that is frozen after the first micro-batch.
        looks: whether rank 0 alone computes the gradient of its inputs before its second backward pass.
    """
    torch.manual_seed(0)
    accelerator, model, optimizer = prepared(None, Experts(), gradient_accumulation_steps=2)
    for number in range(2):
        part = rows[4 * number : 4 * number + 4].chunk(accelerator.num_processes)[accelerator.process_index]
        if number == 1 and frozen is not None:
            accelerator.unwrap_model(model).experts[frozen].requires_grad_(False)
        with accelerator.accumulate(model):
            if looks and number == 1 and accelerator.is_main_process:
                inputs = part.clone().requires_grad_()
                torch.autograd.grad(model(inputs).sum(), inputs)
            accelerator.backward(loss_of(model(part)))
            optimizer.step()
            optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.free_memory()
    return weights


@pytest.mark.parametrize(("frozen", "looks"), [(0, False), (1, False), (None, True), (0, True)])
def test_what_one_rank_has_done_in_a_window_changes_no_bucket(frozen: int | None, looks: bool) -> None:
    rows = torch.tensor([1, 1, -1, -1, 1, -1, 1, -1]).float()[:, None] * torch.arange(1.0, 33.0).view(8, 4) / 32

    def work() -> list[Tensor]:
        return frozen_in_the_middle_of_a_window(rows, frozen, looks=looks)

    (alone,) = run_ranks(work, 1)
    for weights in run_ranks(work, 2, timeout_s=60):
        torch.testing.assert_close(weights, alone)


def test_the_prepared_model_is_the_users_own() -> None:
    def work() -> tuple[bool, bool]:
        accelerator = Accelerator(cpu=True, options={"batch_norm": {"statistics": "local"}})
        model = Net()
        prepared_model = accelerator.prepare(model)
        prepared_model(torch.ones(1, 4))  # the first pass of a model is watched
        prepared_model.load_state_dict(accelerator.get_state_dict(prepared_model))
        copied = pickle.loads(pickle.dumps(prepared_model))
        copied(torch.ones(1, 4))
        return prepared_model is model, isinstance(copied, Net)

    assert run_ranks(work, 2) == [(True, True)] * 2


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", PLANS, ids=["replicate", "zero 1", "zero 2"])
def test_programs_train_as_on_one_process(plan: Plan | None, world: int) -> None:
    programs = [program for program in PROGRAMS if not (plan and plan["zero"] == 2 and program in NOT_UNDER_ROWS)]
    if plan and plan["zero"] == 1:
        # These step without the optimizer whose states are divided.
        programs = [each for each in programs if each not in (hooks_that_step, by_an_unprepared_optimizer)]
    (expected,) = run_ranks(run_all, 1, args=(None, programs))
    assert compare(expected, run_ranks(run_all, world, args=(plan, programs))) == []


def beside_gradients_that_are_returned(plan: Plan | None, *, hooked: bool, when: str) -> list[Tensor]:
    """`torch.autograd.grad` of the parameters, which calls hooks on them and changes no `.grad`."""
    torch.manual_seed(0)
    accelerator, model, optimizer = prepared(plan, nn.Linear(4, 2), gradient_accumulation_steps=2)
    seen = []
    for parameter in accelerator.unwrap_model(model).parameters():
        if hooked:
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for x in batches(accelerator, 4):
        with accelerator.accumulate(model):
            if when == "before":
                seen += torch.autograd.grad(model(x).sum(), list(model.parameters()))
            accelerator.backward(loss_of(model(x)))
            if when == "after":
                seen += torch.autograd.grad(model(x).sum(), list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.free_memory()
    # A hook changes what is returned, too.
    return [*weights, torch.tensor([float(each.abs().max()) <= 0.01 for each in seen] or [False]).all()]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=["replicate", "zero 1", "zero 2"])
def test_gradients_that_are_returned_change_no_step(plan: Plan | None, hooked: bool) -> None:
    def work(divided: Plan | None) -> list[list[Tensor]]:
        ways = ("never", "before", "after")
        return [beside_gradients_that_are_returned(divided, hooked=hooked, when=when) for when in ways]

    (alone,) = run_ranks(work, 1, args=(None,))
    for never, before, after in run_ranks(work, 2, args=({**plan, "shard": 2} if plan else None,)):
        torch.testing.assert_close(never, alone[0])
        torch.testing.assert_close(before, alone[1])
        torch.testing.assert_close(after, alone[2])


# -- models that a rank uses late, or never ------------------------------------------------------------------------------


def two_losses(models: list[nn.Module], x: Tensor, is_used: bool) -> list[Tensor]:
    """Two sums; the second reaches no parameter at all where its model is not used."""
    other = models[1](x).square().sum() if is_used else torch.zeros(()).requires_grad_() * 1.0
    return [models[0](x).square().sum(), other]


def weights_of_two(plan: Plan | None, used: tuple[bool, ...], num_losses: tuple[int, ...]) -> list[Tensor]:
    """Trains two models by means over items in one window.

    Args:
        plan: None trains them in plain PyTorch on the samples of both ranks.
        used: for each micro-batch, whether rank 1 uses the second model.
        num_losses: for each micro-batch, how many of the two losses have a backward pass.
    """
    torch.manual_seed(0)
    models: list[nn.Module] = [nn.Linear(4, 3), nn.Linear(4, 3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    generator = torch.Generator().manual_seed(1)
    windows = torch.randn(len(used), 2, 2, 4, generator=generator)
    if plan is None:
        for loss_number, optimizer in enumerate(optimizers):
            total, num_items = torch.zeros(()), 0
            for number, by_rank in enumerate(windows):
                for rank, x in enumerate(by_rank):
                    if loss_number < num_losses[number]:
                        total = total + two_losses(models, x, rank == 0 or used[number])[loss_number]
                        num_items += 1 + number + 3 * rank
            (total / num_items).backward()
            optimizer.step()
        return [model.weight.detach() for model in models]
    accelerator = Accelerator(cpu=True, plan=plan, gradient_accumulation_steps=len(used))
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    rank = accelerator.process_index
    for number, by_rank in enumerate(windows):
        with accelerator.accumulate(first, second):
            losses = two_losses([first, second], by_rank[rank], rank == 0 or used[number])
            for loss in losses[: num_losses[number]]:
                accelerator.backward(loss, num_items=1 + number + 3 * rank)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    weights = [model.weight.detach().clone() for model in (first, second)]
    accelerator.free_memory()
    return weights


@pytest.mark.parametrize("num_losses", [(2, 2, 2), (2, 2, 1)], ids=["both pass last", "one passes last"])
@pytest.mark.parametrize("used", [(False, False, True), (False, False, False)], ids=["last", "never"])
@pytest.mark.parametrize("plan", PLANS, ids=["replicate", "zero 1", "zero 2"])
def test_a_rank_may_use_a_model_late_or_never(plan: Plan | None, used: Any, num_losses: Any) -> None:
    expected = weights_of_two(None, used, num_losses)
    for weights in run_ranks(weights_of_two, 2, args=({**plan, "shard": 2} if plan else {}, used, num_losses)):
        torch.testing.assert_close(weights, expected)


# -- ranks that run out of batches -----------------------------------------------------------------------------------------


def uneven_parts(rank: int) -> list[Tensor]:
    return list(torch.randn(2 + rank, 6, 4, generator=torch.Generator().manual_seed(rank)))


def train_unevenly() -> list[list[Tensor]]:
    trained = []
    for kind in (Net, Large):
        torch.manual_seed(0)
        accelerator, model, optimizer = prepared({"replicate": 2}, kind())
        with accelerator.join_uneven_inputs([model]):
            for x in uneven_parts(accelerator.process_index):
                model(x)  # a pass that is not trained with tells the other ranks nothing
                accelerator.backward(loss_of(model(x)))
                optimizer.step()
                optimizer.zero_grad()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
        accelerator.free_memory()
    return trained


def test_a_rank_without_batches_adds_zeros() -> None:
    ranks = run_ranks(train_unevenly, 2)
    for number, kind in enumerate((Net, Large)):
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for step in range(3):
            for parts in (uneven_parts(0), uneven_parts(1)):
                if step < len(parts):
                    (loss_of(model(parts[step])) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        for rank in ranks:
            torch.testing.assert_close(rank[number], [parameter.detach() for parameter in model.parameters()])
