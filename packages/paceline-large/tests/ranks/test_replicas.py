"""Ranks that should train the same model, and come apart: a rank decides by numbers that only it has."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, PacelineError, set_seed
from paceline.base.errors import TrainError
from paceline.base.log import forget_warnings

HARMLESS = ("nothing", "reduced rate", "shared noise", "all skip", "shared gradients", "shared rate times gradients")
HARMFUL = (
    "own rate",
    "own plateau",
    "own skip of a batch",
    "own skip of a step",
    "own noise",
    "own first weights",
    "own weights before a save",
    "own loss times weights",
    "own factor in a hook",
    "own loss beside another run",
    "own values in forward",
    "own frozen values in forward",
)


def by_new_gradients(parameter: nn.Parameter, own: float, x: torch.Tensor) -> None:
    parameter.grad = parameter.grad * own + 0.0


def by_limit(parameter: nn.Parameter, own: float, x: torch.Tensor) -> None:
    parameter.grad = parameter.grad.clamp(-own / 50, own / 50)


def by_two_of_one_sum(parameter: nn.Parameter, own: float, x: torch.Tensor) -> None:
    parameter.grad.mul_(1 + own)
    parameter.grad.mul_(1 - own)


def beside_an_infinite_limit(parameter: nn.Parameter, own: float, x: torch.Tensor) -> None:
    parameter.grad.clamp_(-math.inf, 100)
    parameter.grad.mul_(own)


def by_rate(parameter: nn.Parameter, own: float, x: torch.Tensor) -> None:
    parameter.data -= own * parameter.grad


# What a script does to each parameter between `backward` and `step`, by a number that only this rank has.
WRITES: dict[str, Callable[[nn.Parameter, float, torch.Tensor], object]] = {
    "own mean times gradients": lambda parameter, _, x: parameter.grad.mul_(1 + x.mean()),
    "own loss times gradients": lambda parameter, own, _: parameter.grad.mul_(own),
    "own loss times new gradients": by_new_gradients,
    "own limit of new gradients": by_limit,
    "own numbers of one sum": by_two_of_one_sum,
    "own loss beside an infinite limit": beside_an_infinite_limit,
    "own count divides gradients": lambda parameter, own, _: parameter.grad.div_(math.ceil(20 * own)),
    "own rate times gradients": by_rate,
    "own loss beside another run": lambda parameter, own, _: parameter.grad.mul_(own),
    "shared gradients": lambda parameter, *_: parameter.grad.mul_(0.5),
    "shared rate times gradients": lambda parameter, *_: by_rate(parameter, 0.1, parameter),
}
HARMFUL += tuple(how for how in WRITES if how.startswith("own") and how not in HARMFUL)


class Centred(nn.Linear):
    """Writes its centre by the samples that it sees."""

    def __init__(self, how: str) -> None:
        super().__init__(6, 3)
        self.how = how
        if "in forward" in how:
            self.centre = nn.Parameter(torch.zeros(6), requires_grad="frozen" not in how)

    def forward(self, x):
        if "in forward" in self.how:
            self.centre.data.lerp_(x.detach().mean(0), 0.1)
            x = x - self.centre
        return super().forward(x)


def train(accelerator: Accelerator, how: str, folder: str, plan: dict[str, int]) -> None:
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Centred(how))
    optimizer = torch.optim.SGD(filter(lambda parameter: parameter.requires_grad, model.parameters()), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.arange(64) % 3)
    model, optimizer, loader, plateau = accelerator.prepare(model, optimizer, DataLoader(data, 4), plateau)
    rank = accelerator.process_index
    set_seed(rank if how == "own noise" else 0)
    for parameter in model.parameters() if how == "own factor in a hook" else ():
        parameter.register_hook(lambda gradient: gradient * float(1 + x.mean()))
    for number, (x, y) in enumerate(loader):
        if how == "own skip of a batch" and number == 3 + rank:
            continue
        if how == "all skip" and number == 3:
            continue
        if how == "own first weights" and number == 0:
            with torch.no_grad():
                model[2].bias.sub_(model(x).mean(0))  # by the samples of this rank
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        value = loss.detach()
        if how == "reduced rate":
            value = accelerator.reduce(value, "mean")
        if how in ("own rate", "reduced rate"):
            optimizer.param_groups[0]["lr"] = 0.1 * float(value)
        if how == "own plateau":
            plateau.step(1.0 - number * rank)
        own_loss = loss.item()
        for parameter in model.parameters() if how in WRITES else ():
            WRITES[how](parameter, own_loss, x)
        if how != "own skip of a step" or number != 1 + rank:
            optimizer.step()
        optimizer.zero_grad()
        if how == "own loss beside another run":
            Accelerator(cpu=True, plan=plan)
        if how == "own loss times weights":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 - 0.1 * own_loss)
        if how in ("own noise", "shared noise"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape)
    if how == "own weights before a save" and rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 2
    if number == 7:  # after pass 8, at which ranks are compared
        accelerator.save_state(folder)


def outcomes(plan: dict[str, int], hows: tuple[str, ...], folder: str) -> dict[str, str]:
    seen = {}
    for number, how in enumerate(hows):
        accelerator = Accelerator(cpu=True, plan=plan)
        try:
            train(accelerator, how, f"{folder}/{number}", plan)
            seen[how] = "trained"
        except PacelineError as error:
            seen[how] = error.code
        accelerator.free_memory()
    return seen


PLANS = [{}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"shard": 2}]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_ranks_that_come_apart_are_refused(plan: dict[str, int], tmp_path) -> None:
    leave_out = {
        "{}": (),
        # The step itself is one that all ranks take together: a hang report says who waits for whom.
        "{'shard': 2, 'zero': 1}": ("own skip of a step",),
        "{'shard': 2, 'zero': 2}": ("own skip of a step",),
        # No other rank has what a rank changes, and a whole tensor does not meet a shard.
        "{'shard': 2}": ("own noise", "shared noise", "own first weights", "own weights before a save"),
    }[str(plan)]
    harmful = [how for how in HARMFUL if how not in leave_out]
    harmless = [how for how in HARMLESS if how not in leave_out]
    expected = dict.fromkeys(harmless, "trained") | dict.fromkeys(harmful, "replicas-differ")
    assert run_ranks(outcomes, 2, args=(plan, tuple(expected), str(tmp_path))) == [expected] * 2


def by_hand(accelerator: Accelerator, how: str) -> None:
    """Weights that the loop writes itself, without any backward pass of the accelerator."""
    set_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model, loader = accelerator.prepare(model, DataLoader(data, 4))
    draws = torch.Generator().manual_seed(accelerator.process_index if how == "own noise" else 0)
    if how == "own first weights":
        x, _ = next(iter(loader))
        with torch.no_grad():
            model[2].bias.sub_(model(x).mean(0))
    for x, y in loader:
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), model.parameters())
        if how != "own gradients":
            gradients = accelerator.reduce(gradients, "mean")
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
                parameter += 0.01 * torch.randn(parameter.shape, generator=draws)


def told_of_weights(plan: dict[str, int]) -> set[str]:
    seen = set()
    # Under `shard` each line that writes is looked at after 1, 2, 4, 8, ... writes, and one loop writes 32 times.
    for how in ("own gradients", "own noise", "reduced gradients", "own first weights"):
        forget_warnings()
        said: list[str] = []
        for name in ("paceline.train", "paceline.parallel"):
            logger = logging.getLogger(name)
            logger.handlers = [handler := logging.Handler(logging.WARNING)]
            handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # noqa: B023
        accelerator = Accelerator(cpu=True, plan=plan)
        by_hand(accelerator, how)
        accelerator.wait_for_everyone()
        if any("come apart" in text or "differs between the processes" in text for text in said):
            seen.add(how)
        accelerator.free_memory()
    return seen


@pytest.mark.parametrize("plan", [{}, {"shard": 2, "zero": 2}, {"shard": 2}], ids=str)
def test_weights_that_a_loop_writes_by_own_samples_are_told_of(plan: dict[str, int]) -> None:
    # Under `replicate` and ZeRO the last rank says it, under `shard` rank 0.
    one, other = run_ranks(told_of_weights, 2, args=(plan,))
    assert one | other == {"own gradients", "own noise", "own first weights"}


def words_of_the_error() -> list[str]:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TrainError) as caught:
        train(accelerator, "own rate", "", {})
    why = caught.value.problems[0].why
    return [why] if isinstance(why, str) else list(why)


class OfAnotherClass(torch.optim.AdamW):
    """Its step begins twice for torch: for its own method, and for that of its base, which steps this rank's rows."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("plan", [{"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"shard": 2}])
def test_a_step_that_calls_that_of_its_base_is_no_difference(plan: dict[str, int]) -> None:
    def train() -> None:
        accelerator = Accelerator(cpu=True, plan=plan)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
        model, optimizer = accelerator.prepare(model, OfAnotherClass(model.parameters(), lr=0.1))
        for x in torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0)):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(train, 2)


def test_the_error_says_what_differs_and_since_when() -> None:
    differs, since = run_ranks(words_of_the_error, 2)[0]
    assert "`lr` in group 0 of optimizer 0 is" in differs
    assert "pass 2" in since


LOSSES = {
    "mean": lambda z, x, y: F.cross_entropy(z, y),
    "half of the squares": lambda z, x, y: (z - x[:, :3]).square().sum() / (2 * len(x)),
    "mean and a penalty": lambda z, x, y: F.smooth_l1_loss(z, x[:, :3]) + 0.01 * z.abs().sum() / z.numel(),
    "mask inside of a loss": lambda z, x, y: F.mse_loss(z[x[:, 0] > 0], x[x[:, 0] > 0, :3]),
    "ignored targets": lambda z, x, y: F.cross_entropy(z, y, ignore_index=0),
    "root": lambda z, x, y: F.mse_loss(z, x[:, :3]).sqrt(),
    "constant": lambda z, x, y: (z - x[:, :3]).square().sum() / 24,
}


def what_is_told(plan: dict[str, int]) -> dict[str, list[str]]:
    """Words about each loss; the last batch is shorter, and divided into 3 and 2 samples."""
    seen = {}
    said: list[str] = []
    logger = logging.getLogger("paceline.train")
    logger.setLevel(logging.DEBUG)
    logger.handlers = [handler := logging.Handler()]
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    for name, loss_of in LOSSES.items():
        forget_warnings()
        said.clear()
        set_seed(0)
        accelerator = Accelerator(cpu=True, plan=plan, split_batches=True)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        model = nn.Sequential(*layers, nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(2)
        data = TensorDataset(torch.randn(89, 4, generator=generator), torch.arange(89) ** 2 % 5 % 3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 12))
        for x, y in loader:
            if plan:
                accelerator.forward_backward(model, (x, (x, y)), lambda z, given: loss_of(z, *given))  # noqa: B023
            else:
                accelerator.backward(loss_of(model(x), x, y))
            optimizer.step()
            optimizer.zero_grad()
        seen[name] = list(said)
        accelerator.free_memory()
    return seen


@pytest.mark.parametrize(("plan", "world"), [({}, 2), ({"shard": 2}, 2), ({"pp": 2}, 2), ({"pp": 2, "shard": 2}, 4)])
def test_a_loss_whose_numbers_depend_on_the_division_is_told(plan: dict[str, int], world: int) -> None:
    for seen in run_ranks(what_is_told, world, args=(plan,)):
        told = {name: " ".join(said) for name, said in seen.items() if said}
        assert set(told) == {"mask inside of a loss", "ignored targets", "root", "constant"}
        assert all("test_replicas.py:" in said for said in told.values())
        assert "only a part" in told["mask inside of a loss"] and "only a part" in told["ignored targets"]
        assert "computed from a number" in told["root"] and "divided by 24" in told["constant"]


def fused_on_one_stage() -> list[bool]:
    set_seed(0)
    accelerator = Accelerator(cpu=True, plan={"pp": 2}, split_batches=True)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)), nn.Linear(4, 3))
    model[3].weight = nn.Parameter(torch.randn(4, 3).T)  # with gaps in its memory, which fused kernels do not take
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8))
    for x, y in loader:
        accelerator.forward_backward(model, (x, y), F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    return [bool(group["fused"]) for group in optimizer.param_groups]


def test_stages_may_step_with_other_kernels() -> None:
    assert run_ranks(fused_on_one_stage, 2) == [[True], [False]]
