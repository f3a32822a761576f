"""`shard` in every form gives one plain process's losses, norms and weights; and what happens at its edges.

The suite over plans (`test_parity_plans.py`) crosses plans; here one loop goes through the options of `shard` itself.
"""

import logging
import pickle
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from parity_models import GPT, loss_of
from shared_ranks import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline import Accelerator
from paceline.base.errors import PlanError, PrepareError, TrainError

ROWS, STEPS = 8, 3


class Odd(nn.Module):
    """Rows that do not divide, a single number, frozen rows inside a block, and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh()) for _ in range(3)
        )
        self.blocks[1][0].requires_grad_(False)
        self.blocks[2][2].bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(5, 24)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.gain


class Twins(nn.Module):
    """Blocks that share a weight with each other, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))
        self.blocks[2][0].weight = self.blocks[1][0].weight
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return self.head(x)


MODELS: dict[str, Any] = {
    "gpt": lambda: GPT(layers=2),
    "tied": lambda: GPT(tied=True, frozen=True, layers=2),
    "odd": Odd,
    "twins": Twins,
}


@dataclass(frozen=True)
class Case:
    model: str = "gpt"
    optimizer: str = "AdamW"
    accumulate: int = 1
    clip: float | None = None
    precision: str = "no"


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = MODELS[case.model]()
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "Muon":
        trained = [p for p in trained if p.dim() == 2]
    # Adam turns the last bit of a gradient near zero into a whole step: a larger eps compares what training computes.
    named = {"SGD": {"momentum": 0.9}, "Muon": {}}.get(case.optimizer, {"eps": 1e-4})
    return model, getattr(torch.optim, case.optimizer)(trained, lr=0.01, **named)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 24, (STEPS * ROWS, 9), generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in tokens.split(ROWS)]


def plain(case: Case) -> dict[str, Any]:
    """One process without Paceline, each batch whole."""
    model, optimizer = made(case)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    losses, norms = [], []
    for x, y in batches():
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            output = model(x)
        loss = loss_of(output.float(), y)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "weights": model.state_dict()}


def ours(case: Case, plan: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The same through `Accelerator`; this rank's rows of each batch, in micro-batches."""
    from paceline import Accelerator

    model, optimizer = made(case)
    accelerator = Accelerator(
        case.precision, case.accumulate, plan=plan, options={"shard": options}, cpu=True, scaler={"init_scale": 256.0}
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    layout = accelerator.plan.layout
    losses, norms = [], []
    for x, y in batches():
        total = 0.0
        for micro in range(case.accumulate):
            rows = slice(
                layout.data_index(accelerator.process_index) + layout.width * micro,
                None,
                layout.width * case.accumulate,
            )
            with accelerator.accumulate(model):
                loss = loss_of(model(x[rows]), y[rows])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
                optimizer.step()
                optimizer.zero_grad()
            total += float(accelerator.reduce(loss.detach(), "mean"))
        losses.append(total / case.accumulate)
    return {"losses": losses, "norms": norms, "weights": accelerator.get_state_dict(model)}


@cache
def reference(case: Case) -> dict[str, Any]:
    return run_ranks(plain, world=1, args=(case,))[0]


def compare(case: Case, ranks: list[dict[str, Any]]) -> None:
    want = reference(Case(case.model, case.optimizer, 1, case.clip, case.precision))
    tolerance = {"no": 2e-6, "bf16": 2e-2, "fp16": 4e-3}[case.precision]
    if case.optimizer == "Muon":  # its iteration runs in bfloat16, whose sums of parts round differently
        tolerance = 2e-3
    for got in ranks:
        assert got["losses"] == pytest.approx(want["losses"], abs=tolerance)
        assert got["norms"] == pytest.approx(want["norms"], abs=tolerance)
        assert sorted(got["weights"]) == sorted(want["weights"])
        for name, weight in want["weights"].items():
            torch.testing.assert_close(
                got["weights"][name], weight, atol=tolerance, rtol=0, msg=lambda m, n=name: n + m
            )


def check(case: Case, options: dict[str, Any] | None = None, plan: dict[str, Any] | None = None) -> None:
    plan = plan or {"shard": 2}
    world = plan.get("shard", 1) * plan.get("replicate", 1) * plan.get("cp", 1)
    compare(case, run_ranks(ours, world, args=(case, plan, options or {}), timeout_s=80))


def case_of_model(model: str, accumulate: int) -> Case:
    return Case(model, accumulate=accumulate, clip=0.3)


@pytest.mark.parametrize(("model", "accumulate"), [("tied", 2), ("odd", 1), ("odd", 2), ("twins", 2)])
def test_models(model: str, accumulate: int) -> None:
    check(case_of_model(model, accumulate))


@pytest.mark.parametrize("plan", [{"shard": 4}, {"replicate": 2, "shard": 2}], ids=["four", "hybrid"])
def test_four(plan: dict[str, Any]) -> None:
    check(Case("odd", accumulate=2, clip=0.3), plan=plan)


@pytest.mark.parametrize(
    "options",
    [
        {"wrap": "none"},
        {"wrap": "size", "min_params": 200},
        {"wrap": ["Block", "Attention"]},
        {"wrap": "LayerNorm"},
        {"reshard": "no"},
        {"prefetch": 2},
        {"ignored": "blocks.1, LayerNorm"},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    check(Case("gpt", accumulate=2, clip=0.3), options)


def test_ignored_layers_that_freeze_in_a_window() -> None:
    """Their gradients of the passes before are averaged at the end of the window."""

    def body() -> None:
        from paceline import Accelerator

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        plan = {"shard": 2, "options": {"shard": {"ignored": "1"}}}
        accelerator = Accelerator(plan=plan, cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(model)
        for frozen in (False, True):
            accelerator.unwrap_model(model)[1].requires_grad_(not frozen)
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 2), accelerator.process_index + 1.0)).sum())
        everywhere = accelerator.gather(accelerator.unwrap_model(model)[1].weight.grad)
        torch.testing.assert_close(*everywhere.chunk(2))

    run_ranks(body, world=2)


def test_parts_are_kept_on_fewer_ranks() -> None:
    check(Case("gpt", clip=0.3), {"reshard": 2}, {"shard": 4})


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RMSprop", "NAdam"])
def test_optimizers(optimizer: str) -> None:
    check(Case("gpt", optimizer))


@pytest.mark.parametrize(
    ("precision", "options"),
    [("bf16", {}), ("bf16", {"param_dtype": "none"}), ("fp16", {}), ("fp16", {"ignored": "head"})],
    ids=str,
)
def test_half_precision(precision: str, options: dict[str, Any]) -> None:
    check(Case("tied" if not options else "gpt", "SGD" if options else "AdamW", 2, 0.3, precision), options)


def odd_calls() -> dict[str, Any]:
    """A loop in which forward passes fail, are never followed by a backward pass, or are asked for twice."""
    from paceline import Accelerator

    case = Case("gpt")
    model, optimizer = made(case)
    accelerator = Accelerator(plan={"shard": 2}, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, losses = accelerator.process_index, []
    for x, y in batches():
        x, y = x[rank::2], y[rank::2]
        with pytest.raises(IndexError):
            model(x + 100)  # no such token
        model.eval()
        with torch.no_grad():
            first = loss_of(model(x), y)
        assert all(torch.distributed.tensor.DTensor is type(p) for p in model.parameters())  # nothing is left whole
        model.train()
        loss = (loss_of(model(x), y) + loss_of(model(x), y)) / 2
        torch.testing.assert_close(first, loss.detach())
        accelerator.backward(loss)
        model(x)  # for a metric, say: its whole parameters must not outlive the step
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return {"losses": losses, "weights": accelerator.get_state_dict(model)}


def test_odd_calls() -> None:
    want = reference(Case("gpt"))
    for got in run_ranks(odd_calls, world=2):
        assert got["losses"] == pytest.approx(want["losses"], abs=2e-6)
        for name, weight in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], weight, atol=2e-6, rtol=0)


def overflowed() -> tuple[list[bool], float]:
    """fp16 in which rank 1 alone overflows, in the first step."""
    from paceline import Accelerator

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    accelerator = Accelerator("fp16", plan={"shard": 2}, cpu=True, scaler={"init_scale": 64.0})
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for step in range(2):
        loss = model(torch.ones(2, 4)).mean()
        if step == 0 and accelerator.process_index == 1:
            loss = loss * 3e4 * 3e4  # finite, but its gradients are not in float16
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    return skipped, sum(float(value.abs().sum()) for value in accelerator.get_state_dict(model).values())


def test_an_overflow_of_one_rank_is_seen_by_all() -> None:
    (skipped, total), other = run_ranks(overflowed, world=2)
    assert skipped == [True, False] and other == (skipped, total)
    assert total == pytest.approx(total) and total < 100


def whole_and_back() -> tuple[torch.Tensor, list[str]]:
    from paceline import Accelerator

    torch.manual_seed(3)
    model = Odd()
    accelerator = Accelerator(plan={"shard": 2}, cpu=True)
    model = accelerator.prepare(model)
    with accelerator.full_parameters(model, writeback=True):
        assert type(model.head.weight) is nn.Parameter and model.head.weight.shape == (24, 5)
        with torch.no_grad():
            model.head.weight += 1
    with suppress(KeyError), accelerator.full_parameters(model, writeback=True), torch.no_grad():
        model.head.weight += 2
        raise KeyError("what was changed before stays changed, as on one process")
    with accelerator.full_parameters(model), torch.no_grad():
        model.head.weight += 5  # not taken over
    names = [name for name, _ in accelerator.unwrap_model(model).named_parameters()]
    return accelerator.get_state_dict(model)["head.weight"], names


def test_whole_parameters() -> None:
    torch.manual_seed(3)
    plain_model = Odd()
    for weight, names in run_ranks(whole_and_back, world=2):
        torch.testing.assert_close(weight, plain_model.head.weight.detach() + 3)
        assert names == [name for name, _ in plain_model.named_parameters()]


def started_apart(plan: dict[str, Any]) -> list[float]:
    from paceline import Accelerator

    accelerator = Accelerator(plan=plan, cpu=True)
    torch.manual_seed(accelerator.process_index)
    state = accelerator.get_state_dict(accelerator.prepare(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))))
    return [float(value.float().sum()) for value in state.values()]


def test_all_ranks_start_with_the_values_of_the_first() -> None:
    torch.manual_seed(0)
    want = [float(p.float().sum()) for p in nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).state_dict().values()]
    assert run_ranks(started_apart, world=3, args=({"shard": 3},)) == [pytest.approx(want)] * 3


def refused(options: dict[str, Any], plan: dict[str, Any], kind: str) -> str:
    from paceline import Accelerator

    model: nn.Module = GPT(layers=2)
    if kind == "shard-sparse":
        model.embed = nn.Embedding(24, 16, sparse=True)
    if kind == "shard-dtypes":
        model.head.to(torch.bfloat16)
    accelerator = Accelerator(plan=plan, options={"shard": options}, cpu=True)
    with pytest.raises(PlanError) as caught:
        accelerator.prepare(model, torch.optim.LBFGS(model.parameters()) if kind == "shard-optimizer" else None)
    assert all(type(p) is nn.Parameter for p in model.parameters()) or kind == "shard-optimizer"  # nothing was touched
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("shard-wrap", {"wrap": "Layer"}),
        ("shard-ignored", {"ignored": ["adapter.*"]}),
        ("shard-reshard", {"reshard": 2}),
        ("shard-float16", {"param_dtype": "fp16"}),
        ("shard-dtypes", {}),
        ("shard-sparse", {}),
        ("shard-optimizer", {}),
    ],
)
def test_refused(code: str, options: dict[str, Any]) -> None:
    for text in run_ranks(refused, world=2, args=(options, {"shard": 2}, code)):
        assert f"[{code}]" in text


class Routed(nn.Module):
    """Blocks of one shape, of which each call uses some, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.aside = nn.Linear(5, 5)
        self.nothing = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor, *route: int) -> torch.Tensor:
        for number in route:
            x = x + (self.aside if number == 3 else self.blocks[number])(x)
        return x


def steps(model: nn.Module, optimizer: Any, losses: Any, backward: Any, count: int = 3) -> None:
    for step in range(count):
        for loss in losses(model, step):
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def routed(routes: Any, options: dict[str, Any] | None, world: int = 2) -> list[torch.Tensor]:
    """Trains on `routes(rank, step)`; without options on one process, all ranks' parts there."""
    from paceline import Accelerator

    torch.manual_seed(0)
    model = Routed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    ranks = list(range(world))
    backward = lambda loss: (loss / world).backward()  # noqa: E731
    if options is not None:
        accelerator = Accelerator(plan={"shard": world}, options={"shard": options}, cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        ranks, backward = [accelerator.process_index], accelerator.backward
    x = torch.ones(2, 5)
    steps(
        model,
        optimizer,
        lambda net, step: [net(x * (rank + 1), *routes(rank, step)).square().mean() for rank in ranks],
        backward,
    )
    state = model.state_dict() if options is None else accelerator.get_state_dict(model)
    return [value.detach() for value in state.values()]


@pytest.mark.parametrize(
    ("routes", "options"),
    [
        (lambda rank, step: (0, 1, 2, 3) if (rank + step) % 2 else (0, 1, 2), {}),  # of the root, on some ranks only
        (lambda rank, step: (step, 3), {}),  # some blocks on no rank
        (lambda rank, step: ((rank + step) % 3,), {"wrap": "none"}),
        (lambda rank, step: (0, 1, 2, 3)[:: 1 - 2 * rank], {"wrap": "none"}),
    ],
    ids=["root", "none", "one-unit", "order"],
)
def test_parameters_that_some_ranks_leave_out(routes: Any, options: dict[str, Any]) -> None:
    want = routed(routes, None)
    for got in run_ranks(routed, world=2, args=(routes, options)):
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=0)


AS_A_GPU = {"PACELINE_TRANSPORT": "native", "PACELINE_DEBUG": "1"}


OTHER = lambda rank, step: (rank,)  # noqa: E731
IN_OTHER_ORDER = lambda rank, step: (0, 1) if step < 2 or rank else (1, 0)  # noqa: E731


@pytest.mark.parametrize(
    ("routes", "world", "env"),
    [
        (OTHER, 2, {}),  # FSDP2 would compute with the other block's weights
        (IN_OTHER_ORDER, 2, {}),
        (lambda rank, step: (0, 1, 2) if rank else (0,), 3, {}),  # one ends before the others
        pytest.param(OTHER, 2, AS_A_GPU, marks=pytest.mark.needs("lens")),
        pytest.param(IN_OTHER_ORDER, 2, AS_A_GPU, marks=pytest.mark.needs("lens")),
    ],
    ids=["other", "order", "more", "other-native-in-debug-mode", "order-native-in-debug-mode"],
)
def test_ranks_that_compute_different_units_are_told(routes: Any, world: int, env: dict[str, str]) -> None:
    def body() -> str:
        with pytest.raises(PlanError) as caught:
            routed(routes, {}, world)
        return caught.value.code

    assert run_ranks(body, world=world, env=env, timeout_s=30) == ["shard-diverged"] * world


class Breaks(torch.autograd.Function):
    """An error in the backward pass."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("midway")


@pytest.mark.parametrize(
    "plan", [{"shard": 2}, {"shard": 2, "zero": 2}, {"shard": 2, "zero": 1}, {"replicate": 2}], ids=str
)
def test_a_backward_pass_that_fails_leaves_nothing(plan: dict[str, Any]) -> None:
    def train(failing: bool) -> list[torch.Tensor]:
        from paceline import Accelerator

        torch.manual_seed(0)
        model = Routed()
        accelerator = Accelerator(plan=plan, options={"zero": {"bucket_cap_mb": 1e-4}}, cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        inner = accelerator.unwrap_model(model)
        x = torch.full((2, 5), accelerator.process_index + 1.0)
        for _ in range(2):
            if failing:
                handle = inner.blocks[1].register_forward_hook(lambda *each: Breaks.apply(each[-1]))
                with pytest.raises(ArithmeticError):
                    accelerator.backward(model(x, 0, 1, 2, 3).square().mean())
                handle.remove()
                optimizer.zero_grad()
            steps(model, optimizer, lambda net, step: [net(x, 0, 1, 2, 3).square().mean()], accelerator.backward, 2)
        return [value.detach() for value in accelerator.get_state_dict(model).values()]

    def body() -> None:
        for mine, theirs in zip(train(True), train(False), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-7, rtol=0)

    run_ranks(body, world=2, timeout_s=30)


@pytest.mark.parametrize(
    "plan", [{"shard": 2}, {"shard": 2, "zero": 2}, {"shard": 2, "zero": 1}, {"replicate": 2}], ids=str
)
def test_several_losses_of_a_step(plan: dict[str, Any]) -> None:
    """A graph that is used twice, two forward passes before the backward passes, and parameters that thaw."""

    def train(plan: dict[str, Any] | None) -> list[torch.Tensor]:
        from paceline import Accelerator

        torch.manual_seed(0)
        model = inner = Routed()
        model.aside.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ranks = [0, 1]
        backward = lambda loss, **named: (loss / 2).backward(**named)  # noqa: E731
        if plan is not None:
            accelerator = Accelerator(plan=plan, cpu=True)
            model, optimizer = accelerator.prepare(model, optimizer)
            inner, backward = accelerator.unwrap_model(model), accelerator.backward
            ranks = [accelerator.process_index]
        for step in range(4):
            if step == 2:
                inner.aside.requires_grad_(True)
            for rank in ranks:
                one, two = (model(torch.full((2, 5), rank + x), 0, 1, 2, 3) for x in (0.5, 1.0))
                backward(one.square().mean(), retain_graph=True)
                backward(one.abs().mean())
                backward(two.square().mean())
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict() if plan is None else accelerator.get_state_dict(model)
        return [value.detach() for value in state.values()]

    want = train(None)
    for got in run_ranks(train, world=2, args=(plan,)):
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("plan", [{"shard": 2}, {"shard": 2, "zero": 2}, {"shard": 2, "zero": 1}], ids=str)
def test_gradients_that_nobody_shared_are_not_stepped(plan: dict[str, Any]) -> None:
    def body() -> None:
        from paceline import Accelerator

        torch.manual_seed(0)
        accelerator = Accelerator(plan=plan, cpu=True)
        model = nn.Linear(5, 5)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.ones(2, 5)
        for _ in range(2):
            with accelerator.no_sync(model):
                accelerator.backward(model(x).mean())
            with pytest.raises(TrainError, match="step-held"):
                optimizer.step()
            optimizer.zero_grad()
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(body, world=2)


def steps_in_no_sync(plan: dict[str, Any], registered: str) -> torch.Tensor:
    """Steps inside of `no_sync`, where a hook on a parameter waits for the mean of each pass."""
    from paceline import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(plan=plan, cpu=True)
    model = nn.Linear(4, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(1)
    for number in range(3):
        x = torch.randn(4, 4, generator=generator).chunk(accelerator.num_processes)[accelerator.process_index]
        with accelerator.no_sync(model):
            for place in ("before", "between"):
                if place == "between":
                    loss = model(x).square().mean()
                if number == 0 and place == registered:
                    for parameter in model.parameters():
                        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)["weight"].clone()


@pytest.mark.parametrize("registered", ["before", "between"])
def test_hooks_that_are_registered_where_gradients_are_held_see_their_mean(registered: str) -> None:
    (expected,) = run_ranks(steps_in_no_sync, world=1, args=({}, registered))
    for weights in run_ranks(steps_in_no_sync, world=2, args=({"shard": 2}, registered)):
        torch.testing.assert_close(weights, expected)


def grad_after_freezing(plan: dict[str, Any]) -> torch.Tensor:
    """A layer is frozen for another forward pass, and trained again before the graph of the first one is used."""
    from paceline import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(plan=plan, cpu=True)
    model = accelerator.prepare(Routed())
    x = torch.ones(2, 5)
    loss = model(x, 0, 1).square().mean()
    inner = accelerator.unwrap_model(model)
    inner.requires_grad_(False)
    model(x.clone().requires_grad_(), 0, 1)
    inner.requires_grad_(True)
    parameters = [inner.blocks[0][0].weight, inner.blocks[1][0].weight]
    first, second = torch.autograd.grad(loss, parameters, retain_graph=True)
    return torch.cat([first, second])


def test_the_graph_of_a_layer_that_was_frozen_since_gives_gradients() -> None:
    (expected,) = run_ranks(grad_after_freezing, world=1, args=({},))
    for got in run_ranks(grad_after_freezing, world=2, args=({"shard": 2},)):
        torch.testing.assert_close(got, expected)


def test_hooks_and_second_derivatives_are_refused() -> None:
    def body() -> None:
        from paceline import Accelerator

        accelerator = Accelerator(plan={"shard": 2}, cpu=True)
        hooked = Routed()
        hooked.blocks[0][0].weight.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(PlanError, match=r"shard-hooks.*\n.*blocks\.0\.0\.weight"):
            accelerator.prepare(hooked)
        model = accelerator.prepare(Routed())
        x = torch.ones(2, 5, requires_grad=True)
        with pytest.raises(PlanError, match="shard-double-backward"):
            torch.autograd.grad(model(x, 0, 1).sum(), x, create_graph=True)
        seen = []
        model.aside.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
        accelerator.backward(model(x, 0, 3).sum())
        assert seen == [(5, 5)]

    run_ranks(body, world=2)


def test_whole_states_are_loaded() -> None:
    """A model's and an optimizer's state dict of one plain process, by their own `load_state_dict`."""

    def body() -> None:
        from paceline import Accelerator

        torch.manual_seed(1)
        plain_model = Routed()
        plain_optimizer = torch.optim.AdamW(plain_model.parameters())
        x = torch.ones(2, 5)
        plain_model(x, 0, 1, 2, 3).mean().backward()
        plain_optimizer.step()
        model = Routed()
        accelerator = Accelerator(plan={"shard": 2}, cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        model.load_state_dict(plain_model.state_dict())
        optimizer.load_state_dict(deepcopy(plain_optimizer.state_dict()))
        plain_optimizer.zero_grad()
        plain_model(x, 0, 1, 2, 3).mean().backward()
        accelerator.backward(model(x, 0, 1, 2, 3).mean())
        plain_optimizer.step()
        optimizer.step()
        for name, value in accelerator.get_state_dict(model).items():
            torch.testing.assert_close(value, plain_model.state_dict()[name], atol=1e-6, rtol=0)

    run_ranks(body, world=2)


def several_networks(sharded: bool) -> dict[str, torch.Tensor]:
    """A container without a `forward`, whose networks a loop calls one by one."""
    torch.manual_seed(0)
    networks = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 6), nn.Tanh()), "heads": nn.ModuleList()})
    networks["heads"].extend(nn.Linear(6, 3) for _ in range(2))
    accelerator = Accelerator(cpu=True, plan={"zero": 3 if sharded else 0})
    networks, optimizer = accelerator.prepare(networks, torch.optim.SGD(networks.parameters(), lr=0.1, momentum=0.9))
    for _ in range(3):
        hidden = networks["body"](torch.ones(2, 4))
        accelerator.backward(sum(head(hidden).square().mean() for head in networks["heads"]))
        accelerator.clip_grad_norm_(networks.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(networks)


def test_a_container_whose_networks_are_called_one_by_one() -> None:
    expected, _ = run_ranks(several_networks, 2, args=(False,))
    for weights in run_ranks(several_networks, 2, args=(True,)):
        torch.testing.assert_close(weights, expected)


def test_an_average_of_weights_is_copied_before_prepare_and_what_is_divided_is_said() -> None:
    def averaged(plan: dict[str, int] | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        accelerator = Accelerator(cpu=True, plan=plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, average, optimizer = accelerator.prepare(model, average, optimizer)
        for _ in range(3):
            accelerator.backward(model(torch.ones(2, 4)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        if accelerator.num_processes > 1:
            copies = [lambda: deepcopy(model), lambda: pickle.dumps(model), model.share_memory]
            for copied in (*copies, lambda: AveragedModel(accelerator.unwrap_model(model))):
                with pytest.raises(PrepareError) as caught:
                    copied()
                assert caught.value.code == "model-copy"
                assert "accelerator.prepare(model, average, optimizer)" in str(caught.value)
        return accelerator.get_state_dict(average)

    def work() -> tuple[dict[str, torch.Tensor], list[str]]:
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("paceline.plan").addHandler(handler)
        return averaged({"shard": 2}), said

    (first, said), (_, elsewhere) = run_ranks(work, world=2)
    torch.testing.assert_close(first, averaged(None))
    assert any(line.startswith("Sequential (44 parameters): zero=3 divides parameters, gradients and") for line in said)
    assert elsewhere == []


class WatchedSGD(torch.optim.SGD):
    """Treats each element by itself, and notes what it steps."""

    elementwise = True

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.stepped_divided = any(isinstance(p, torch.distributed.tensor.DTensor) for p in parameters)
        return super().step(closure)


class WatchedAdamW(torch.optim.AdamW):
    """Does not say that it treats each element by itself, so that each parameter is stepped by one rank."""


def local_steps(kind: str, closure: bool) -> tuple[list[torch.Tensor], bool]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, plan={"shard": 2})
    model = Odd()
    named = {"AdamW": torch.optim.AdamW, "whole": WatchedAdamW, "SGD": WatchedSGD}
    options = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.1, "fused": True}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim()]
    optimizer = named[kind](trained, **options)
    model, prepared = accelerator.prepare(model, optimizer)
    seen = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append(isinstance(o.param_groups[0]["params"][0], torch.distributed.tensor.DTensor))
    )

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(torch.arange(6).view(2, 3)).square().mean()
        accelerator.backward(value)
        return value.detach()

    for _ in range(3):
        if closure:
            assert prepared.step(loss) > 0
        else:
            loss()
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            prepared.step()
    # A subclass' step calls its superclass', whose hooks see the local parts.
    assert seen[:: len(seen) // 3] == [True] * 3
    states = [
        value for state in optimizer.state.values() for value in state.values() if value is not None and value.dim()
    ]
    divided = [isinstance(state, torch.distributed.tensor.DTensor) for state in states]
    assert states and set(divided) == {kind != "whole"}
    with accelerator.full_parameters(model):
        weights = [parameter.detach().clone() for parameter in accelerator.unwrap_model(model).parameters()]
    return weights, getattr(optimizer, "stepped_divided", False)


@pytest.mark.parametrize("closure", [False, True])
def test_optimizers_that_treat_elements_alone_step_local_parts(closure: bool) -> None:
    (local, _), _ = run_ranks(local_steps, world=2, args=("AdamW", closure))
    (divided, _), _ = run_ranks(local_steps, world=2, args=("whole", closure))
    for one, other in zip(local, divided, strict=True):
        # The fused kernel rounds the last elements of a tensor otherwise, and parts end elsewhere.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    (_, stepped_divided), _ = run_ranks(local_steps, world=2, args=("SGD", closure))
    assert not stepped_divided
