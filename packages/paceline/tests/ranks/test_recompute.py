"""Recompute and compile: the numbers stay what they were, to the last bit, and activations shrink."""

from typing import Any

import pytest
import torch
from parity_models import GPT, loss_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paceline import Accelerator, TrainError
from paceline.testing import run_ranks


class Dropped(nn.Module):
    """Around a block: what it gives is dropped in part."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.drop = block, nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.block(x))


def run(plan: dict[str, Any], options: dict[str, Any], precision: str = "no") -> tuple[list[Any], int]:
    """Losses and gradients of three steps with dropout, and the bytes kept between forward and backward."""
    torch.manual_seed(1)
    model = GPT(layers=6)
    model.blocks = nn.ModuleList(Dropped(block) for block in model.blocks)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accelerator = Accelerator(precision, plan=plan, options=options, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert [name for name, _ in accelerator.unwrap_model(model).named_parameters()] == names
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    numbers: list[Any] = []
    for step in range(3):
        tokens = torch.arange(8 * (12 + step)).view(8, -1) % 24
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(model(tokens), tokens.roll(1))
        accelerator.backward(loss)
        numbers += [float(loss.detach()), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        numbers.append(model(tokens))
    return numbers, sum(kept.values())


def runs(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [run(*case) for case in cases]


def test_recomputed_numbers_are_equal_to_the_last_bit_and_activations_shrink() -> None:
    plans = ["no", "blocks", "selective", "2"]
    kept = {}
    for precision in ("no", "bf16"):
        (found,) = run_ranks(runs, world=1, args=([({"recompute": plan}, {}, precision) for plan in plans],))
        for plan, (numbers, size) in zip(plans, found, strict=True):
            kept[plan] = size
            for got, want in zip(numbers, found[0][0], strict=True):
                assert torch.equal(torch.as_tensor(got), torch.as_tensor(want)), f"{plan}, {precision}"
        assert kept["blocks"] < 0.45 * kept["no"]
        assert kept["blocks"] < kept["2"] < 0.8 * kept["no"]


def test_less_is_kept_of_fewer_operations() -> None:
    cases = [
        ({"recompute": "selective"}, {}),
        ({"recompute": "selective"}, {"recompute": {"save": ["bmm"]}}),
        ({"recompute": "selective"}, {"recompute": {"save": "addmm,mm"}}),
        ({"recompute": "selective"}, {"recompute": {"products": 2}}),
    ]
    (found,) = run_ranks(runs, world=1, args=(cases,))
    for numbers, _ in found[1:]:
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(numbers, found[0][0], strict=True)
        )


def arithmetic(plan: dict[str, Any], options: dict[str, Any]) -> int:
    accelerator = Accelerator(plan=plan, options=options, cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(GPT(layers=4))
    tokens = torch.arange(16).view(2, 8)
    accelerator.backward(loss_of(model(tokens), tokens))  # the first call is not selective
    with FlopCounterMode(display=False) as counter:
        accelerator.backward(loss_of(model(tokens), tokens))
    return counter.get_total_flops()


def test_products_that_are_not_kept_are_computed_again() -> None:
    cases = [("no", 1), ("selective", 1), ("selective", 2), ("blocks", 1)]
    found = {}
    for recompute, products in cases:
        arguments = ({"recompute": recompute}, {"recompute": {"products": products}})
        (found[recompute, products],) = run_ranks(arithmetic, world=1, args=arguments)
    plain, kept, half, again = (found[case] for case in cases)
    assert plain == kept < half < again


def called(plan: dict[str, Any]) -> tuple[int, int]:
    accelerator = Accelerator(plan=plan, options={"compile": {"backend": "eager"}}, cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(GPT(layers=4))
    blocks = accelerator.unwrap_model(model).blocks
    compiled = sum(block._compiled_call_impl is not None for block in blocks)
    calls = []
    blocks[0].attention.register_forward_hook(lambda *_: calls.append(1))
    tokens = torch.arange(16).view(2, 8)
    accelerator.backward(loss_of(model(tokens), tokens))
    return compiled, len(calls)


def test_blocks_run_twice_where_they_are_recomputed() -> None:
    assert run_ranks(called, world=1, args=({},))[0] == (0, 1)
    assert run_ranks(called, world=1, args=({"recompute": "blocks"},))[0] == (0, 2)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(x))))


def gradients(plans: list[tuple[dict[str, Any], str]]) -> list[list[torch.Tensor]]:
    found = []
    for plan, backend in plans:
        torch.manual_seed(1)
        model = nn.Sequential(Small(), Small())
        accelerator = Accelerator(plan=plan, options={"compile": {"backend": backend}} if plan else {}, cpu=True)
        model = accelerator.prepare(model)
        accelerator.backward(model(torch.arange(32.0).view(4, 8) / 32).square().sum())
        found.append([p.grad for p in model.parameters()])
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own look at what it compiles
def test_compiled_blocks_give_the_same_numbers_and_drop_the_same() -> None:
    plans = [
        ({}, ""),
        ({"compile": True}, "eager"),
        ({"compile": True, "recompute": "blocks"}, "aot_eager"),
    ]
    (found,) = run_ranks(gradients, world=1, args=(plans,), timeout_s=110)
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want)
    assert run_ranks(called, world=1, args=({"compile": True},), timeout_s=100)[0][0] == 4


class Counted(Small):
    """A block with a buffer that its passes change and read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x):
        self.passes += 1
        return super().forward(x) * self.passes


def passed_twice(recompute: str) -> tuple[list[Any], str]:
    torch.manual_seed(1)
    model = nn.Sequential(Counted(), Counted())
    model = Accelerator(plan={"recompute": recompute}, cpu=True).prepare(model)
    try:
        for number in range(2):
            x = (torch.arange(32.0).view(4, 8) / 32 + number).requires_grad_()
            loss = model(x).square().mean()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
    except TrainError as error:
        return [], error.code
    return [[p.grad for p in model.parameters()], list(model.buffers())], ""


def all_passed_twice() -> list[Any]:
    return [passed_twice(recompute) for recompute in ("no", "blocks", "selective")]


def test_two_backward_passes_through_a_block() -> None:
    (((plain, _), (again, _), (_, code)),) = run_ranks(all_passed_twice, world=1)
    torch.testing.assert_close(again, plain)
    assert code == "recompute-twice"


class Normed(nn.Module):
    """A block whose numbers depend on its mode, and not only by what it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


def changed_between_passes(plan: dict[str, Any]) -> list[torch.Tensor]:
    """A GAN's critic is frozen for the forward pass of the generator, and in evaluation mode for some passes."""
    torch.manual_seed(2)
    accelerator = Accelerator(plan=plan, cpu=True)
    generator, critic = accelerator.prepare(nn.Sequential(Normed(), Normed()), nn.Sequential(Normed(), Normed()))
    x = torch.randn(8, 4)
    inner = accelerator.unwrap_model(critic)
    for is_training in (True, False):
        inner.requires_grad_(False).train(is_training)
        generated = critic(generator(x)).square().mean()
        inner.requires_grad_(True).train(not is_training)
        accelerator.backward(generated)
        judged = critic(x).square().mean()
        inner.train(is_training)
        accelerator.backward(judged)
    found = []
    for parameter in (*generator.parameters(), *critic.parameters()):
        assert parameter.requires_grad and parameter.grad is not None
        found.append(parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad)
    return found


def all_changed_between_passes(plans: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    return [changed_between_passes(plan) for plan in plans]


@pytest.mark.parametrize("world", [1, 2])
def test_a_block_is_computed_again_as_it_was_in_the_forward_pass(world: int) -> None:
    plans = [{}, {"recompute": "blocks"}, {"recompute": "blocks", "shard": world}]
    plain, *others = run_ranks(all_changed_between_passes, world, args=(plans,))[0]
    for gradients_of_plan in others:
        for mine, expected in zip(gradients_of_plan, plain, strict=True):
            torch.testing.assert_close(mine, expected)
