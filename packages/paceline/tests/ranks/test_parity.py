"""The parity suite: every data-parallel plan gives the numbers of one plain PyTorch process, in many ways of training.

The reference is a loop without Paceline on the whole global batch. The same loop under each plan, at 2 and 3
processes, must give its losses, gradient norms and final weights: float32 within 2e-6 (sums in another order), fp16
within 2e-3 (the forward rounds to 11 bits).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from parity_models import ON_CPU
from shared_ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A small net with tied, frozen and (on demand) unused parameters."""

    def __init__(self, unused: bool = False):
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.out = nn.Linear(6, 3)
        self.extra = nn.Linear(6, 3) if unused else None

    def forward(self, x):
        return self.out(torch.tanh(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))))


@dataclass(frozen=True)
class Case:
    """One way of training. `items` weighs the loss by a count that differs from sample to sample."""

    name: str
    samples: int = 48
    global_batch: int = 12
    accumulate: int = 1
    epochs: int = 2
    precision: str = "no"
    clip: float | None = None
    unused: bool = False
    items: bool = False
    shuffle: bool = False
    workers: int = 0
    optimizer: str = "AdamW"


CASES = [
    Case("even"),
    Case("uneven", samples=43),
    Case("one sample in the tail", samples=37),
    Case("accumulate", accumulate=2),
    Case("partial last window", samples=53, accumulate=3),
    Case("clip", samples=43, clip=0.05),
    Case("clip and accumulate", samples=53, clip=0.05, accumulate=3),
    Case("unused parameters", samples=43, unused=True),
    Case("unused parameters and accumulate", samples=43, unused=True, accumulate=2),
    Case("items", samples=43, items=True, accumulate=2),
    Case("fp16", samples=43, precision="fp16", clip=0.05, epochs=1, optimizer="SGD"),
    Case("bf16", samples=43, precision="bf16", epochs=1, optimizer="SGD"),
    Case("shuffled with workers", samples=43, shuffle=True, workers=1, epochs=1),
]


def make(case: Case):
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(case.samples, 6, generator=generator),
        torch.randint(0, 3, (case.samples,), generator=generator),
        torch.randint(1, 9, (case.samples,), generator=generator),
    )
    torch.manual_seed(7)
    model = Net(case.unused)
    kind = getattr(torch.optim, case.optimizer)
    return data, model, kind([p for p in model.parameters() if p.requires_grad], lr=0.05)


def plain(case: Case) -> dict[str, Any]:
    """The reference: one process, whole global batches, no Paceline."""
    data, model, optimizer = make(case)
    size = case.global_batch
    batches = [data[a : a + size] for a in range(0, case.samples, size)]
    losses, norms = [], []
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16", init_scale=1024.0)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(case.precision)
    for _ in range(case.epochs):
        for start in range(0, len(batches), case.accumulate):
            window = batches[start : start + case.accumulate]
            total = sum(int(w.sum()) if case.items else len(x) for x, _, w in window)
            for x, y, weight in window:
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    output = model(x)
                each = nn.functional.cross_entropy(output.float(), y, reduction="none")
                loss = (each * weight).sum() if case.items else each.sum()
                scaler.scale(loss / total).backward()
                losses.append(float(loss.detach()) / (float(weight.sum()) if case.items else len(x)))
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach().clone() for n, p in model.named_parameters()}}


def ours(case: Case, plan: dict[str, int]) -> dict[str, Any]:
    """The same loop through `Accelerator`."""
    from paceline import Accelerator

    data, model, optimizer = make(case)
    accelerator = Accelerator(
        case.precision, case.accumulate, plan=plan, data_seed=11, cpu=ON_CPU, scaler={"init_scale": 1024.0}
    )
    loader = DataLoader(
        data, case.global_batch // accelerator.plan.layout.width, shuffle=case.shuffle, num_workers=case.workers
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for _ in range(case.epochs):
        for x, y, weight in loader:
            with accelerator.accumulate(model):
                each = nn.functional.cross_entropy(model(x), y, reduction="none")
                if case.items:
                    accelerator.backward((each * weight).sum(), num_items=int(weight.sum()))
                else:
                    accelerator.backward(each.mean())
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip or 1e9)))
                optimizer.step()
                optimizer.zero_grad()
            all_losses, weights = accelerator.gather_for_metrics((each.detach(), weight))
            weights = weights.float() if case.items else torch.ones_like(all_losses)
            losses.append(float((all_losses * weights).sum() / weights.sum()))
    weights = accelerator.get_state_dict(model)
    names = [name for name, _ in accelerator.unwrap_model(model).named_parameters()]
    return {"losses": losses, "norms": norms, "weights": {name: weights[name].cpu().clone() for name in names}}


def compare(got: dict[str, Any], want: dict[str, Any], tolerance: float) -> None:
    assert got["losses"] == pytest.approx(want["losses"], abs=tolerance)
    assert got["norms"] == pytest.approx(want["norms"], abs=tolerance)
    assert list(got["weights"]) == list(want["weights"])
    for name, weight in want["weights"].items():
        torch.testing.assert_close(
            got["weights"][name], weight, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@cache
def reference(case: Case) -> dict[str, Any]:
    """`plain` in a process of its own: this one, which forks, must not start autograd's threads."""
    return run_ranks(plain, world=1, args=(case,))[0]


PLANS: list[dict[str, int]] = [{"replicate": 1}, {"shard": 1, "zero": 1}, {"shard": 1, "zero": 2}, {"shard": 1}]


def named(plan: dict[str, int]) -> str:
    return "-".join(key + str(value) * (key == "zero") for key, value in plan.items())


ON_THREE = {"uneven", "one sample in the tail", "unused parameters and accumulate", "clip and accumulate"}
RUNS = [(case, world) for case in CASES for world in (2, 3) if world == 2 or case.name in ON_THREE]


TOLERANCES = {"no": 2e-6, "bf16": 2e-2, "fp16": 2e-3}


@pytest.mark.parametrize("plan", PLANS, ids=named)
@pytest.mark.parametrize(("case", "world"), RUNS, ids=[f"{case.name}-{world}" for case, world in RUNS])
def test_equals_one_plain_process(case: Case, plan: dict[str, int], world: int) -> None:
    # The order of shuffled samples is ours, so that the reference is one process under Paceline.
    expected = one_under_paceline(case) if case.shuffle else reference(case)
    sizes = {key: value if key == "zero" else world for key, value in plan.items()}
    for got in run_ranks(ours, world, args=(case, sizes), timeout_s=80, group=ON_CPU):
        compare(got, expected, TOLERANCES[case.precision])


@cache
def one_under_paceline(case: Case) -> dict[str, Any]:
    return run_ranks(ours, world=1, args=(case, {}), group=ON_CPU)[0]


@pytest.mark.parametrize("case", [case for case in CASES if not case.shuffle], ids=lambda case: case.name)
def test_one_process_under_paceline_equals_none(case: Case) -> None:
    compare(one_under_paceline(case), reference(case), TOLERANCES[case.precision])
