"""A state saved in the middle of an accumulation window: the gradients of its first micro-batches are taken along.

With groups of parameters, a schedule and buffers beside them, so that these tests also hold what `test_reshard.py` leaves to
the night.
"""

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
BATCH, WINDOW, BEFORE, MICRO, CLOSE = 12, 3, 5, 8, 3e-6  # the last window has two micro-batches

PLANS: dict[str, Plan] = {
    "alone": {}, "replicate2": {"replicate": 2}, "replicate3": {"replicate": 3}, "zero1": {"shard": 2, "zero": 1},
    "zero2": {"shard": 2, "zero": 2}, "shard2": {"shard": 2}, "tp2": {"tp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2},
    "shard-tp": {"shard": 2, "tp": 2}, "pp-shard": {"pp": 2, "shard": 2}, "tp-pp": {"tp": 2, "pp": 2},
    "replicate-tp": {"replicate": 2, "tp": 2}, "replicate-shard": {"replicate": 2, "shard": 2},
}  # fmt: skip


def ranks_of(name: str) -> int:
    return int(torch.tensor([PLANS[name].get(axis, 1) for axis in AXES]).prod())


def data() -> TensorDataset:
    tokens = torch.randint(0, 24, (MICRO * BATCH, 9), generator=torch.Generator().manual_seed(5))
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def sum_of(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


class Gained(Block):
    """A block with a buffer, which one stage of a pipeline alone holds."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("gain", 1 + 0.1 * torch.randn(width))

    def forward(self, x):
        return super().forward(x * self.gain.to(x.dtype))


class Net(GPT):
    """Tied embeddings, frozen positions, buffers on blocks and on the root."""

    def __init__(self) -> None:
        super().__init__(tied=True, frozen=True, layers=2)
        self.blocks = nn.ModuleList(Gained(16, 4) for _ in range(2))
        self.register_buffer("seen", torch.randn(5))


class Run:
    """A training run under a plan that accumulates.

    Args:
        way: "window" leaves the windows to `accumulate`, "items" weighs by tokens, "plain" counts by itself, "fp16" scales.
    """

    def __init__(self, name: str, way: str = "window", seed: int = 7) -> None:
        torch.manual_seed(seed)
        model = Net()
        matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
        rest = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
        groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.way = way
        self.accelerator = Accelerator(
            "fp16" if way == "fp16" else "no", 1 if way == "plain" else WINDOW, cpu=True, plan=PLANS[name], data_seed=3,
            split_batches=True, scaler={"init_scale": 1024.0, "growth_interval": 2},
        )  # fmt: skip
        loader = DataLoader(data(), BATCH, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )

    def step(self) -> None:
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def train(self, folder: str | None = None, begin: int = 0) -> list[float]:
        """The losses of what is left of the epoch; saved after `BEFORE` micro-batches where a folder is given."""
        losses = []
        for number, (x, y) in enumerate(self.loader, begin):
            if self.way == "plain":
                loss = self.accelerator.forward_backward(self.model, (x, y), lambda *each: loss_of(*each) / WINDOW)
                if number % WINDOW == WINDOW - 1:
                    self.step()
            else:
                with self.accelerator.accumulate(self.model):
                    if self.way == "items":
                        count = int(y.numel())
                        loss = self.accelerator.forward_backward(self.model, (x, y), sum_of, num_items=count) / count
                    else:
                        loss = self.accelerator.forward_backward(self.model, (x, y), loss_of)
                    self.step()
            losses.append(float(self.accelerator.reduce(loss, "mean")))
            if folder is not None and len(losses) == BEFORE:
                self.accelerator.save_state(folder)
        weights = self.accelerator.get_state_dict(self.model)
        return [*losses, *(float(weight.double().sum()) for _, weight in sorted(weights.items()))]


def resumed(name: str, way: str, folder: str) -> list[float]:
    run = Run(name, way, seed=8)
    run.accelerator.load_state(folder)
    return run.train(begin=BEFORE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root: Path = tmp_path_factory.mktemp("saved")

    @cache
    def save(name: str, way: str = "window") -> tuple[str, list[float]]:
        folder = str(root / f"{name}-{way}")
        return folder, run_ranks(lambda: Run(name, way).train(folder), world=ranks_of(name))[0]

    return save


WAYS = [("window", name) for name in PLANS] + [
    *(("plain", name) for name in ("replicate2", "zero2", "shard2", "pp2", "pp-shard")),
    *(("items", name) for name in ("replicate2", "pp2")),
    *(("fp16", name) for name in ("replicate2", "zero2", "shard2")),
]


@pytest.mark.parametrize(("way", "name"), WAYS)
def test_the_window_goes_on_with_the_same_bits(way, name, saved) -> None:
    folder, whole = saved(name, way)
    for found in run_ranks(resumed, world=ranks_of(name), args=(name, way, folder)):
        assert found == whole[BEFORE:]


PAIRS = {
    "alone": ["replicate3", "zero2", "shard2", "tp2", "cp2", "pp2", "shard-tp", "pp-shard"],
    "replicate2": ["alone", "pp2"], "replicate3": ["alone", "zero1"], "zero1": ["alone"], "zero2": ["alone", "pp-shard"],
    "shard2": ["alone", "replicate3", "tp-pp"], "tp2": ["shard2", "pp2"], "cp2": ["replicate2"], "pp2": ["alone", "zero2"],
    "shard-tp": ["tp2"], "pp-shard": ["shard-tp", "cp2"], "tp-pp": ["shard-tp"], "replicate-tp": ["replicate-shard"],
    "replicate-shard": ["replicate-tp"],
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_the_window_goes_on_under_another_layout(name, saved) -> None:
    """One checkpoint after the other, into the same objects."""
    cases = [(other, way) for other in PAIRS[name] for way in ("window",)]
    folders = [saved(other, way)[0] for other, way in cases]

    def resume() -> list[list[float]]:
        run, found = Run(name, seed=8), []
        for folder in folders:
            run.accelerator.load_state(folder)
            found.append(run.train())
        return found

    for ranks in run_ranks(resume, world=ranks_of(name)):
        for case, losses in zip(cases, ranks, strict=True):
            losses, want = losses[: MICRO - BEFORE], saved("alone")[1][BEFORE:MICRO]
            assert losses == pytest.approx(want, abs=CLOSE), case


@pytest.mark.parametrize(
    ("way", "before", "after"),
    [("items", "alone", "replicate2"), ("items", "shard2", "alone"), ("plain", "pp2", "zero2"), ("plain", "zero2", "pp2"),
     ("plain", "shard2", "alone"), ("items", "replicate2", "pp2")],
)  # fmt: skip
def test_other_ways_to_accumulate_under_another_layout(way, before, after, saved) -> None:
    folder = saved(before, way)[0]
    for found in run_ranks(resumed, world=ranks_of(after), args=(after, way, folder)):
        assert found[: MICRO - BEFORE] == pytest.approx(saved("alone", way)[1][BEFORE:MICRO], abs=CLOSE)
