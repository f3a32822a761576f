"""One format for every plan: what was saved under any layout goes on under any other with the losses of one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from parity_models import GPT, Block, loss_of
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.world.layout import AXES

Plan = dict[str, Any]
BATCH, BEFORE, STEPS, CLOSE = 12, 2, 4, 3e-6

PLANS: dict[str, Plan] = {
    "alone": {},
    "replicate3": {"replicate": 3}, "replicate4": {"replicate": 4},
    "zero1": {"shard": 2, "zero": 1}, "zero1x3": {"shard": 3, "zero": 1},
    "zero2": {"shard": 2, "zero": 2}, "zero2x3": {"shard": 3, "zero": 2},
    "shard2": {"shard": 2}, "shard3": {"shard": 3}, "shard4": {"shard": 4},
    "tp2": {"tp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}, "interleaved": {"pp": 2},
    "replicate-shard": {"replicate": 2, "shard": 2}, 
    "replicate-zero2": {"replicate": 2, "shard": 2, "zero": 2},
    "shard-tp": {"shard": 2, "tp": 2}, "pp-shard": {"pp": 2, "shard": 2}, "tp-pp": {"tp": 2, "pp": 2},
    "replicate-pp": {"replicate": 2, "pp": 2},
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "interleaved": {"pipeline": {"schedule": "interleaved", "microbatches": 4, "stages_per_rank": 2}},
    "replicate4": {"replicate": {"bucket_cap_mb": 0.004}},  # several buckets
}


def ranks_of(name: str) -> int:
    return int(torch.tensor([PLANS[name].get(axis, 1) for axis in AXES]).prod())


class Gained(Block):
    """A block with a buffer, which one stage of a pipeline alone holds."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("gain", 1 + 0.1 * torch.randn(width))

    def forward(self, x):
        return super().forward(x * self.gain)


class Net(GPT):
    """Tied embeddings, frozen positions, buffers on blocks and on the root."""

    def __init__(self) -> None:
        super().__init__(tied=True, frozen=True)
        self.blocks = nn.ModuleList(Gained(16, 4) for _ in range(4))
        self.register_buffer("seen", torch.randn(5))


def data() -> TensorDataset:
    tokens = torch.randint(0, 24, (STEPS * BATCH, 9), generator=torch.Generator().manual_seed(5))
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


class Run:
    """A training run under a plan."""

    def __init__(self, name: str, seed: int = 7) -> None:
        torch.manual_seed(seed)
        model = Net()
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        rest = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
        groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.accelerator = Accelerator(cpu=True, plan=PLANS[name], options=OPTIONS.get(name), data_seed=3,
                                       split_batches=True)  # fmt: skip
        loader = DataLoader(data(), BATCH, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def train(self, save: tuple[int, str] | None = None) -> list[float]:
        """The losses of what is left of the epoch."""
        losses = []
        for batch in self.loader:
            loss = self.accelerator.forward_backward(self.model, batch, loss_of)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(float(self.accelerator.reduce(loss, "mean")))
            if save is not None and len(losses) == save[0]:
                self.accelerator.save_state(save[1])
        return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Trains and saves under a plan, once; its folder, and its losses."""
    root: Path = tmp_path_factory.mktemp("saved")

    @cache
    def save(name: str) -> tuple[str, list[float]]:
        folder = str(root / name)
        return folder, run_ranks(lambda: Run(name).train((BEFORE, folder)), world=ranks_of(name))[0]

    return save


# Every plan is left for one process and entered from one; the others are pairs that share nothing but names.
DIRECT = {
    "replicate3": ["shard-tp", "zero2"], "replicate4": ["tp-pp"], "zero1": ["zero2x3", "cp2"], "zero1x3": ["interleaved"],
    "zero2": ["zero1x3"], "zero2x3": ["shard4"], "shard2": ["interleaved"], "shard3": ["shard4"],
    "tp2": ["pp2", "replicate-zero2"], "cp2": ["tp-pp"], "pp2": ["zero2", "shard3"], "interleaved": ["pp-shard"],
    "replicate-shard": ["pp2"], "shard-tp": ["tp2"], "pp-shard": ["shard-tp"], "replicate-zero2": ["replicate-pp"],
}  # fmt: skip
# By day the pairs of `test_reshard_window.py` are tried, whose states have all that these have and a window beside it. A
# pipeline of several stages a rank has its own order of layers, and is tried here.
FEW = {"shard2": ["interleaved"], "interleaved": ["shard2"]}


@pytest.mark.parametrize("name", ["alone", *FEW])
def test_any_layout_is_taken_up_under_any_other(name, saved) -> None:
    check(name, [*FEW] if name == "alone" else ["alone", *FEW[name]], saved)


@pytest.mark.parametrize("name", PLANS)
def test_any_layout_is_taken_up_under_any_other_in_all_pairs(name, saved) -> None:
    whole = [other for other in PLANS if other != "alone"]
    check(name, whole if name == "alone" else ["alone", *DIRECT.get(name, ())], saved)


def check(name: str, others: list[str], saved) -> None:
    """First its own, which must go on with the same bits; then, into the same objects, those of other layouts."""
    folders = [saved(other)[0] for other in (name, *others)]

    def resume() -> list[list[float]]:
        run, found = Run(name, seed=8), []
        for folder in folders:
            run.accelerator.load_state(folder)
            found.append(run.train())
        return found

    whole, want = saved(name)[1], saved("alone")[1]
    assert whole == pytest.approx(want, abs=CLOSE)
    for own, *ranks in run_ranks(resume, world=ranks_of(name)):
        assert own == whole[BEFORE:]
        for other, losses in zip(others, ranks, strict=True):
            assert losses == pytest.approx(want[BEFORE:], abs=CLOSE), other
