"""What a script does besides steps works the same under every plan: saving, loading, whole states, evaluation, several models.

Each plan is held to one process that trains the same rows: the numbers of the states that come out are its numbers.
"""

import copy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from parity_models import GPT, loss_of
from safetensors.torch import load_file
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.world.layout import AXES
from paceline.world.sharded import whole

Plan = dict[str, Any]
DATA = [{"replicate": 2}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"shard": 2}, {"replicate": 2, "shard": 2}]
PLANS = [*DATA, {"tp": 2}, {"cp": 2}, {"pp": 2}]
BATCH, EXACT = 4, {"atol": 3e-6, "rtol": 0}


def named(plan: Plan) -> str:
    return "-".join(f"{key}{value}" for key, value in plan.items())


def ranks_of(plan: Plan) -> int:
    width = 1
    for axis in AXES:
        width *= plan.get(axis, 1)
    return width


every_plan = pytest.mark.parametrize("plan", PLANS, ids=named)
data_plan = pytest.mark.parametrize("plan", DATA, ids=named)


def data(rows=2 * BATCH) -> TensorDataset:
    tokens = torch.randint(0, 24, (rows, 9), generator=torch.Generator().manual_seed(5))
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def net(seed=7) -> nn.Module:
    torch.manual_seed(seed)
    return GPT(tied=True, frozen=True, layers=2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-4)


def prepared(plan: Plan, seed=7, rows=2 * BATCH):
    accelerator = Accelerator(cpu=True, plan=plan)
    model = net(seed)
    loader = DataLoader(data(rows), BATCH // accelerator.plan.layout.width)
    return accelerator, *accelerator.prepare(model, adamw(model), loader)


def train(accelerator, model, optimizer, loader):
    losses = []
    for batch in loader:
        loss = accelerator.forward_backward(model, batch, loss_of)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss, "mean")))
    return losses


@cache
def reference():
    """One process: the loss of each step of two epochs, and the weights after each epoch."""

    def work():
        run = prepared({})
        found = []
        for _ in range(2):
            losses = train(*run)
            found.append((losses, copy.deepcopy(run[0].get_state_dict(run[1]))))
        return found

    return run_ranks(work, world=1)[0]


def agree(state, want):
    assert sorted(state) == sorted(want)
    for name, tensor in want.items():
        assert type(state[name]) in (torch.Tensor, nn.Parameter), name
        torch.testing.assert_close(state[name].detach(), tensor, **EXACT, msg=lambda m, n=name: f"{n}: {m}")


@every_plan
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(plan, tmp_path):
    folder = tmp_path / "saved"
    (_, first), (later, last) = reference()

    def save():
        run = prepared(plan)
        train(*run)
        run[0].save_state(folder)
        accelerator, model, _, _ = run
        before = accelerator.get_state_dict(model)
        again = prepared(plan, seed=8)
        again[0].load_state(folder)
        agree(again[0].get_state_dict(again[1]), first)
        assert all(torch.equal(again[0].get_state_dict(again[1])[name], tensor) for name, tensor in before.items())
        assert train(*again) == pytest.approx(later, abs=3e-6)
        agree(again[0].get_state_dict(again[1]), last)

    def resume_alone():
        run = prepared({}, seed=8)
        run[0].load_state(folder)
        assert train(*run) == pytest.approx(later, abs=3e-6)
        agree(run[0].get_state_dict(run[1]), last)

    run_ranks(save, world=ranks_of(plan), timeout_s=40)
    run_ranks(resume_alone, world=1, timeout_s=40)


@every_plan
def test_a_checkpoint_of_one_process_is_taken_up(plan, tmp_path):
    (_, first), (later, last) = reference()

    def save_alone():
        run = prepared({})
        train(*run)
        run[0].save_state(tmp_path / "saved")

    def resume():
        run = prepared(plan, seed=8)
        run[0].load_state(tmp_path / "saved")
        agree(run[0].get_state_dict(run[1]), first)
        assert train(*run) == pytest.approx(later, abs=3e-6)
        agree(run[0].get_state_dict(run[1]), last)

    run_ranks(save_alone, world=1, timeout_s=40)
    run_ranks(resume, world=ranks_of(plan), timeout_s=40)


@every_plan
def test_whole_states_and_files(plan, tmp_path):
    (_, first), _ = reference()
    own = dict(net().named_parameters())  # a tied weight once

    def work():
        accelerator, model, optimizer, loader = prepared(plan)
        train(accelerator, model, optimizer, loader)
        state = accelerator.get_state_dict(model)
        agree(state, first)
        accelerator.save_model(model, tmp_path / "model")
        inner = accelerator.unwrap_model(model)
        assert isinstance(inner, GPT)
        names = dict(inner.named_parameters())
        assert names.keys() <= first.keys()  # a stage of a pipeline may hold a tied weight under its other name alone
        assert names.keys() == own.keys() or plan.get("pp", 1) > 1
        divided = {name: type(p) for name, p in names.items()}
        with accelerator.full_parameters(model):
            for name, parameter in inner.named_parameters():
                torch.testing.assert_close(whole(parameter).detach(), first[name], **EXACT)
                assert parameter.shape == first[name].shape
                assert type(parameter.data) is torch.Tensor
        assert {name: type(p) for name, p in inner.named_parameters()} == divided
        with accelerator.full_parameters(model, writeback=True), torch.no_grad():
            for parameter in inner.parameters():
                parameter.mul_(2.0)
        agree(accelerator.get_state_dict(model), {name: 2 * tensor for name, tensor in first.items()})
        return sorted(state)

    found = run_ranks(work, world=ranks_of(plan), timeout_s=40)
    assert found == [sorted(first)] * ranks_of(plan)
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert sorted(files) == sorted(own)
    agree(files, {name: first[name] for name in own})


@every_plan
def test_evaluation_over_a_last_batch_that_is_not_full(plan):
    rows = 2 * BATCH + 2
    x, y = data(rows).tensors
    expected = net().eval()
    with torch.no_grad():
        want = expected(x)

    def work():
        accelerator, model, optimizer, loader = prepared(plan, rows=rows)
        model.eval()
        outputs, targets = [], []
        with torch.no_grad():
            for inputs, target in loader:
                output, target = accelerator.gather_for_metrics((model(inputs), target))
                outputs.append(output)
                targets.append(target)
        assert torch.equal(torch.cat(targets), y)
        torch.testing.assert_close(torch.cat(outputs), want, **EXACT)
        model.train()
        train(accelerator, model, optimizer, loader)

    run_ranks(work, world=ranks_of(plan), timeout_s=40)


@every_plan
def test_an_average_of_the_weights(plan):
    """A copy of each parameter, whatever it became, moves with it."""

    def work(plan):
        accelerator, model, optimizer, loader = prepared(plan)
        inner = accelerator.unwrap_model(model)
        average = {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}
        for batch in loader:
            accelerator.forward_backward(model, batch, loss_of)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, parameter in inner.named_parameters():
                    average[name].lerp_(parameter.detach(), 0.25)
        return {name: whole(tensor) for name, tensor in average.items()}

    (want,) = run_ranks(work, world=1, args=({},))
    found = run_ranks(work, world=ranks_of(plan), args=(plan,), timeout_s=40)
    want["head.weight"] = want["embed.weight"]  # tied; the last stage of a pipeline holds it under this name
    assert set().union(*found) >= want.keys() - {"head.weight"}
    for average in found:
        agree(average, {name: want[name] for name in average})


# -- several models -----------------------------------------------------------------------------------------------------


def mlp(*sizes):
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers)


def adversaries(plan):
    """A generator and a discriminator, each with its optimizer; the losses of each go through the other."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, plan=plan)
    maker, judge = mlp(4, 8, 8, 6), mlp(6, 8, 8, 1)
    optimizers = torch.optim.AdamW(maker.parameters(), lr=0.01, eps=1e-4), torch.optim.SGD(judge.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    rows = TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 6, generator=generator))
    loader = DataLoader(rows, 8 // accelerator.plan.layout.width)
    maker, judge, make, test, loader = accelerator.prepare(maker, judge, *optimizers, loader)
    for noise, real in loader:
        accelerator.backward(judge(maker(noise).detach()).mean() - judge(real).mean())
        accelerator.clip_grad_norm_(judge.parameters(), 1.0)
        test.step()
        test.zero_grad()
        accelerator.backward(-judge(maker(noise)).mean())
        accelerator.clip_grad_norm_(maker.parameters(), 0.1)
        make.step()
        make.zero_grad()
        test.zero_grad()
    return accelerator.get_state_dict(maker), accelerator.get_state_dict(judge)


@data_plan
def test_two_models_that_train_against_each_other(plan):
    (want,) = run_ranks(adversaries, world=1, args=({},))
    for found in run_ranks(adversaries, world=ranks_of(plan), args=(plan,), timeout_s=40):
        for state, expected in zip(found, want, strict=True):
            agree(state, expected)


def distilled(plan, teachers_plan):
    """A student learns from a frozen teacher, which has another plan."""
    accelerator = Accelerator(cpu=True, plan=plan)
    teacher = accelerator.prepare_model(net(seed=9).requires_grad_(False).eval(), plan=teachers_plan)
    student = net()
    loader = DataLoader(data(), BATCH // accelerator.plan.layout.width)
    student, optimizer, loader = accelerator.prepare(student, adamw(student), loader)
    for tokens, _ in loader:
        with torch.no_grad():
            aim = teacher(tokens).softmax(-1)
        accelerator.backward(nn.functional.kl_div(student(tokens).log_softmax(-1), aim, reduction="batchmean"))
        accelerator.clip_grad_norm_(student.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(student), accelerator.get_state_dict(teacher)


@data_plan
def test_a_frozen_teacher_under_another_plan(plan):
    want = run_ranks(distilled, world=1, args=({}, None))[0]
    world = ranks_of(plan)
    other = "replicate" if plan.keys() == {"shard"} else "shard"
    for found in run_ranks(distilled, world=world, args=(plan, {other: world}), timeout_s=40):
        for state, expected in zip(found, want, strict=True):
            agree(state, expected)
