"""Odd states under plans: bit-equal after a resume, refused where they do not fit, and never a whole model on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from parity_models import GPT, loss_of
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.base.errors import CheckpointError
from paceline.world.layout import AXES
from paceline.world.sharded import is_sharded

Plan = dict[str, Any]
ALONE: Plan = {}
PLANS: list[Plan] = [
    ALONE, {"replicate": 2}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"shard": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2},
]  # fmt: skip
BATCH, STEPS, BEFORE = 4, 5, 2


def named(plan: Plan) -> str:
    return "-".join(f"{key}{value}" for key, value in plan.items()) or "alone"


def ranks_of(plan: Plan) -> int:
    return int(torch.tensor([plan.get(axis, 1) for axis in AXES]).prod())


class Odd(GPT):
    """An uneven table, a head that no loss reaches, a counter that forward passes move, and dropout."""

    def __init__(self) -> None:
        super().__init__(tied=True, frozen=True, layers=2)
        self.unused = nn.Linear(16, 3)
        self.register_buffer("table", torch.randn(5, 16))

    def forward(self, tokens):
        return super().forward(tokens) + 0 * self.table.sum()


class Average:
    """A moving average of parameters, whatever they became."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def follow(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.25)

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        for name, value in self.values.items():  # a stage of a pipeline finds those of all stages
            assert is_sharded(state[name]) == is_sharded(value), "each rank reads its shards alone"
            value.copy_(state[name])


class Run:
    """Two parameter groups of one optimizer, one of which has momentum; and an optimizer that never steps."""

    def __init__(self, plan: Plan, precision: str = "no", seed: int = 7) -> None:
        torch.manual_seed(seed)
        model = Odd()
        used = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("unused")]
        groups = [
            {"params": [p for p in used if p.dim() > 1]},
            {"params": [p for p in used if p.dim() < 2], "lr": 0.02},
        ]
        self.accelerator = Accelerator(
            precision, cpu=True, plan=plan, data_seed=3, split_batches=True,
            scaler={"init_scale": 4096.0, "growth_interval": 2},
        )  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        idle = torch.optim.SGD(model.unused.parameters(), 0.1, momentum=0.9)
        tokens = torch.randint(0, 24, (STEPS * BATCH, 9), generator=torch.Generator().manual_seed(5))
        loader = DataLoader(TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone()), BATCH, shuffle=True)
        self.model, self.optimizer, self.idle, self.loader = self.accelerator.prepare(model, optimizer, idle, loader)
        self.average = Average(self.accelerator.unwrap_model(self.model))
        self.accelerator.register_for_checkpointing(self.average)

    def train(self, folder: str | None = None) -> list[Any]:
        seen: list[Any] = []
        for number, batch in enumerate(self.loader):
            loss = self.accelerator.forward_backward(self.model, batch, loss_of)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.average.follow(self.accelerator.unwrap_model(self.model))
            scale = self.accelerator.scaler
            seen.append((float(loss), torch.rand(1).item(), scale and scale.state_dict()["scale"]))
            if folder is not None and number + 1 == BEFORE:
                self.accelerator.save_state(folder)
        return seen


CASES = [(plan, "no") for plan in PLANS] + [(plan, "fp16") for plan in PLANS[1:-2]] + [(PLANS[4], "bf16")]


@pytest.mark.parametrize(("plan", "precision"), CASES, ids=lambda each: each if isinstance(each, str) else named(each))
def test_everything_goes_on_with_the_same_bits(plan, precision, tmp_path) -> None:
    def work() -> None:
        run = Run(plan, precision)
        whole = run.train(str(tmp_path / "saved"))
        again = Run(plan, precision, seed=8)
        again.accelerator.load_state(tmp_path / "saved")
        assert again.train() == whole[BEFORE:]
        for name, value in run.average.values.items():
            mine, theirs = (getattr(each, "_local_tensor", each) for each in (again.average.values[name], value))
            assert torch.equal(mine, theirs), name

    run_ranks(work, world=ranks_of(plan))


# -- checkpoints that do not fit ------------------------------------------------------------------------------------------


class Other(nn.Module):
    """A model of other names and shapes."""

    def __init__(self, width: int = 16, renamed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.out_proj = nn.Linear(width, 24)
        if renamed:
            self.head, self.out_proj = self.out_proj, None

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return (self.out_proj or self.head)(x)


def other(plan: Plan, seed: int = 1, **named: Any):
    torch.manual_seed(seed)
    columns = {"tensor": {"plan": {"*": "replicated"}}}
    accelerator, model = Accelerator(cpu=True, plan=plan, options=columns if "tp" in plan else None), Other(**named)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


@pytest.mark.parametrize("plan", [ALONE, {"shard": 2}, {"shard": 2, "zero": 1}, {"tp": 2}, {"pp": 2}], ids=named)
def test_another_model_is_refused_in_words_of_the_whole_model(plan, tmp_path) -> None:
    folder = tmp_path / "saved"

    def save() -> None:
        other({})[0].save_state(folder)

    def load() -> None:
        for named, said in (
            (
                {"renamed": True},
                ["head.weight (24, 16) (closest: out_proj.weight)", "2 only in the checkpoint: out_proj"],
            ),
            ({"width": 8}, ["6 of another shape", "blocks.0.0.weight: (16, 16) there, (8, 8) here", "embed.weight"]),
        ):
            accelerator, model, optimizer = other(plan, seed=2, **named)
            before = copy.deepcopy(accelerator.get_state_dict(model))
            with pytest.raises(CheckpointError, match="checkpoint-other-model") as refused:
                accelerator.load_state(folder)
            assert all(text in str(refused.value) for text in said), str(refused.value)
            assert "embed" not in str(refused.value) or "width" in named
            after = accelerator.get_state_dict(model)
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert not optimizer.state and optimizer.steps == 0
        accelerator, model, _ = other(plan, seed=2, renamed=True)
        mine = copy.deepcopy(accelerator.get_state_dict(model))
        accelerator.load_state(folder, strict=False)
        loaded = accelerator.get_state_dict(model)
        assert torch.equal(loaded["head.weight"], mine["head.weight"])
        assert not torch.equal(loaded["embed.weight"], mine["embed.weight"])

    run_ranks(save, world=1)
    run_ranks(load, world=ranks_of(plan))


def test_a_window_of_ranks_that_went_apart_stays_with_its_layout(tmp_path) -> None:
    folder = tmp_path / "saved"

    def save() -> None:
        accelerator, model, _ = other({"replicate": 2})
        accelerator.gradients.set_steps(2)
        accelerator.gradients.mark_replicas(equal=False)
        with accelerator.accumulate(model):
            accelerator.forward_backward(model, (torch.zeros(2, 3).long(), torch.zeros(2, 3).long()), loss_of)
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        assert not accelerator.sync_gradients

    def load() -> None:
        with pytest.raises(CheckpointError, match="checkpoint-window"):
            other({})[0].load_state(folder)

    run_ranks(save, world=2)
    run_ranks(load, world=1)


# -- memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{"shard": 2}, {"tp": 2}, {"pp": 2}], ids=named)
def test_a_load_makes_no_whole_model(plan, tmp_path) -> None:
    """What a load allocates is counted: the states of one rank, and one tensor more."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0
        messages = 1 << 22  # the buffer of two ranks' messages, which is made once

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                size = getattr(found, "_local_tensor", found).untyped_storage().nbytes()
                Largest.most = max(Largest.most, 0 if size == Largest.messages else size)
            return found

    def work() -> int:
        torch.manual_seed(0)
        accelerator, model = Accelerator(cpu=True, plan=plan), GPT(layers=2, width=256)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        tokens = torch.zeros(8, 8).long()
        accelerator.forward_backward(model, (tokens, tokens), loss_of)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(tmp_path / "saved")
        with Largest():
            accelerator.load_state(tmp_path / "saved")
        return Largest.most

    whole = max(p.nbytes for p in GPT(layers=2, width=256).parameters())
    assert max(run_ranks(work, world=2)) <= (whole if "pp" in plan else whole // 2)


# -- several models -------------------------------------------------------------------------------------------------------


class Adversaries:
    """Two models, optimizers and schedulers; gradients of the judge are left over from the maker's turn."""

    def __init__(self, plan: Plan, seed: int = 3) -> None:
        torch.manual_seed(seed)
        self.accelerator = Accelerator(cpu=True, plan=plan, data_seed=3, split_batches=True)
        maker, judge = (nn.Sequential(nn.Linear(a, 8), nn.Tanh(), nn.Linear(8, b)) for a, b in ((4, 6), (6, 1)))
        make, test = torch.optim.AdamW(maker.parameters(), 0.01), torch.optim.SGD(judge.parameters(), 0.1, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (make, test)]
        rows = torch.randn(STEPS * BATCH, 10, generator=torch.Generator().manual_seed(5))
        loader = DataLoader(TensorDataset(rows), BATCH, shuffle=True)
        self.maker, self.judge, self.make, self.test, self.loader, *self.schedulers = self.accelerator.prepare(
            maker, judge, make, test, loader, *schedulers
        )

    def train(self, folder: str | None = None) -> list[tuple[float, float]]:
        seen = []
        for number, (batch,) in enumerate(self.loader):
            noise, real = batch.split([4, 6], 1)
            self.test.zero_grad()
            judged = self.judge(torch.cat([self.maker(noise).detach(), real])).tanh()
            loss = judged[: len(real)].mean() - judged[len(real) :].mean()
            self.accelerator.backward(loss)
            self.test.step()
            self.make.zero_grad()
            other = -self.judge(self.maker(noise)).tanh().mean()
            self.accelerator.backward(other)
            self.make.step()
            for each in self.schedulers:
                each.step()
            seen.append((float(loss.detach()), float(other.detach())))
            if folder is not None and number + 1 == BEFORE:
                self.accelerator.save_state(folder)
        return seen


@pytest.mark.parametrize("plan", PLANS[:5], ids=named)
def test_models_that_train_against_each_other_go_on(plan, tmp_path) -> None:
    def save_and_resume() -> list[tuple[float, float]]:
        whole = Adversaries(plan).train(str(tmp_path / "saved"))
        again = Adversaries(plan, seed=4)
        again.accelerator.load_state(tmp_path / "saved")
        assert again.train() == whole[BEFORE:]
        return whole[BEFORE:]

    def resume_alone() -> list[tuple[float, float]]:
        run = Adversaries(ALONE, seed=4)
        run.accelerator.load_state(tmp_path / "saved")
        return run.train()

    ranks = torch.tensor(run_ranks(save_and_resume, world=ranks_of(plan)))
    (alone,) = run_ranks(resume_alone, world=1)
    torch.testing.assert_close(ranks.mean(0), torch.tensor(alone), atol=3e-6, rtol=0)
