"""Activations that wait in the host's memory: the same bits, fewer on the device, under every plan and with recomputation."""

import weakref

import pytest
import torch
from parity_models import GPT, loss_of

from paceline import Accelerator
from paceline.base.errors import PacelineError
from paceline.testing import run_ranks
from paceline_large.offload import activation_copies
from paceline_large.offload.activation_copies import ActivationCopies

# `always`: on a CPU nothing is moved otherwise.
OPTIONS = {"offload": {"always": True}}
PLANS = [
    {},
    {"replicate": 2},
    {"shard": 2, "zero": 1},
    {"shard": 2, "zero": 2},
    {"shard": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2},
    {"cp": 2},
]


def trained(plan: dict, offload: str, accumulate: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    moved: list[int] = []
    plain = ActivationCopies._copied

    def counted(self, part):
        moved.append(part.nbytes)
        return plain(self, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationCopies, "_copied", counted)
        # The tensors of this model are small.
        patch.setattr(activation_copies, "SMALLEST", 1)
        settings = {**plan, "offload": offload}
        accelerator = Accelerator("no", accumulate, cpu=True, plan=settings, options=OPTIONS)
        model = GPT(layers=4)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for _ in range(accumulate):
                x, y = torch.randint(24, (2, 2, 8), generator=generator)
                with accelerator.accumulate(model):
                    accelerator.forward_backward(model, (x, y), loss_of)
                    optimizer.step()
                    optimizer.zero_grad()
    assert bool(moved) == offload.endswith("activations")
    return list(accelerator.get_state_dict(model).values())


# Each plan with two ways to recompute, in turn, and `optimizer` offloaded beside one of them.
RECOMPUTES = (("no", "blocks"), ("no", "selective"), ("blocks", "2"), ("selective", "2"))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_same_bits(plan: dict) -> None:
    number = PLANS.index(plan)

    def work() -> None:
        for recompute in RECOMPUTES[number % len(RECOMPUTES)]:
            is_optimizer_too = recompute == "no" and number % 2 == 0
            before, offload = ("optimizer", "optimizer+activations") if is_optimizer_too else ("no", "activations")
            settings = {**plan, "recompute": recompute}
            want = trained(settings, before)
            got = trained(settings, offload)
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True)), (recompute, offload)

    run_ranks(work, 2 if plan else 1)


def test_two_micro_batches_and_a_retained_graph() -> None:
    assert all(map(torch.equal, trained({}, "activations", 2), trained({}, "no", 2)))
    torch.manual_seed(0)
    copies = ActivationCopies(torch.device("cpu"), pinned=False)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    x = torch.randn(16, 32)
    gradients = []
    for is_moved in (False, True):
        if is_moved:
            copies.attach(plain)
        plain.zero_grad()
        loss = plain(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in plain.parameters()])
    assert all(map(torch.equal, *gradients))


def test_layouts_come_back_and_memory_is_freed() -> None:
    copies = ActivationCopies(torch.device("cpu"), pinned=False)
    strides: list[tuple[int, ...]] = []
    alive: list[weakref.ref] = []

    class Strided(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return sum(tensor.sum() for tensor in tensors)

        @staticmethod
        def backward(ctx, gradient):
            strides.extend(tensor.stride() for tensor in ctx.saved_tensors)
            return tuple(gradient.expand(tensor.shape) for tensor in ctx.saved_tensors)

    class Block(torch.nn.Module):
        def forward(self, x):
            fused = torch.tanh(x)
            query, key = fused.chunk(2, dim=-1)
            saved = [query, key.t(), fused[:, :1].expand(-1, 64)]
            alive.append(weakref.ref(fused))
            strides.extend(tensor.stride() for tensor in saved)
            return Strided.apply(*saved)

    block = Block()
    copies.attach(block)
    loss = block(torch.randn(32, 64, requires_grad=True))
    # An expanded tensor is saved as it is, and keeps what it is a view of.
    loss.backward()
    assert strides[:3] == strides[3:]
    copies = ActivationCopies(torch.device("cpu"), pinned=False)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
    copies.attach(layer)
    output = layer(torch.randn(32, 64))
    last = copies._last()
    assert last is not None and len(last.saved) >= 2
    ref = weakref.ref(last)
    del last
    output.sum().backward()
    del output, loss
    assert ref() is None


def test_compiled_blocks_are_refused() -> None:
    accelerator = Accelerator(cpu=True, plan={"offload": "activations", "compile": True})
    with pytest.raises(PacelineError) as caught:
        accelerator.prepare(GPT(layers=2))
    assert caught.value.code == "offload-compile"


def test_a_cpu_moves_nothing_and_the_plan_says_it() -> None:
    accelerator = Accelerator(cpu=True, plan={"offload": "activations"})
    model = accelerator.prepare(GPT(layers=2))
    assert "offload" not in "".join(vars(model.blocks[0]))
    assert "offload.activations" in [decision.field for decision in accelerator.plan.decisions]
