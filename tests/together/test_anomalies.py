"""A step with an anomaly that one rank alone sees: every rank decides the same, under every plan."""

import os
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from parity_models import GPT
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, LocalSGD
from paceline.base.exits import STOPPED
from paceline.testing import RankFailed, run_ranks

Plan = dict[str, Any]
PLANS = [{"replicate": 2}, {"shard": 2}, {"replicate": 2, "pp": 2}]
MORE_PLANS = [
    {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"replicate": 2, "shard": 2}, {"replicate": 2, "tp": 2},
    {"shard": 2, "cp": 2},
]  # fmt: skip
DROPOUT = "Dropping"
BATCH, BAD = 4, 18  # the sample of the fifth step that makes its loss NaN


def ranks_of(plan: Plan) -> int:
    return plan.get("replicate", 1) * plan.get("shard", 1) * plan.get("tp", 1) * plan.get("pp", 1) * plan.get("cp", 1)


def loss_of(output, target):
    """Mean cross entropy; a target of -7 stands for a sample that breaks it."""
    loss = functional.cross_entropy(output.flatten(0, -2), target.clamp(min=0).flatten())
    return loss * torch.where((target < 0).any(), torch.nan, 1.0)


def rows_of(left_out: range, bad: bool) -> TensorDataset:
    tokens = torch.randint(0, 24, (7 * BATCH, 9), generator=torch.Generator().manual_seed(5))
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    if bad:
        targets[BAD, 3] = -7
    kept = [row for row in range(len(tokens)) if row not in left_out]
    return TensorDataset(inputs[kept], targets[kept])


class Dropping(nn.Module):
    """The model behind a dropout, whose draws show whether the random streams go on rightly."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(layers=2)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        return self.dropout(self.model(tokens))


def train(
    plan: Plan, folder: str, action: str, left_out: range = range(0), saves_after: int = 2, **more: Any
) -> dict[str, Any]:
    """One epoch; a checkpoint after the second step, and the bad sample in the fifth."""
    accelerator = Accelerator(
        cpu=True,
        plan=plan,
        project_dir=folder,
        split_batches=True,
        anomalies={"nan": action, **more} if action else None,
    )
    torch.manual_seed(7)
    model: nn.Module = GPT(layers=2) if plan.keys() & {"tp", "pp", "cp"} else Dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(rows_of(left_out, bad=bool(action)), BATCH)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    skips, step = [], 0
    try:
        for batch in loader:
            accelerator.forward_backward(model, batch, loss_of)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            skips.append(accelerator.optimizer_step_was_skipped)
            step += 1
            if step == saves_after:
                accelerator.save_state()
        code = None
    except SystemExit as left:
        code = left.code
    return {
        "code": code,
        "modules": type(accelerator.unwrap_model(model)).__name__,
        "skips": skips,
        "counts": accelerator.anomaly_counts,
        "steps": (optimizer.steps, schedule.scheduler.last_epoch),
        "weights": {name: value.clone() for name, value in accelerator.get_state_dict(model).items()},
        "lr": optimizer.param_groups[0]["lr"],
        "saved": sorted(os.listdir(f"{folder}/checkpoints")) if saves_after else [],
    }


def same(run: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit for bit."""
    assert run["weights"].keys() == other["weights"].keys()
    return run["lr"] == other["lr"] and all(
        torch.equal(value, other["weights"][name]) for name, value in run["weights"].items()
    )


@pytest.mark.parametrize(
    "plan", [*PLANS, *(pytest.param(plan, marks=pytest.mark.long) for plan in MORE_PLANS)], ids=str
)
def test_the_run_goes_on_as_if_the_data_had_never_been_there(plan, tmp_path):
    """Bit for bit, and on all ranks."""

    def runs() -> Any:
        went_back = train(plan, str(tmp_path / "back"), "rollback")
        skipped = train(plan, str(tmp_path / "skip"), "skip")
        without_three = train(plan, str(tmp_path / "without-three"), "", range(2 * BATCH, 5 * BATCH))
        without_one = train(plan, str(tmp_path / "without-one"), "", range(4 * BATCH, 5 * BATCH))
        return went_back, skipped, without_three, without_one

    for went_back, skipped, without_three, without_one in run_ranks(runs, ranks_of(plan)):
        assert went_back["skips"] == skipped["skips"] == [False] * 4 + [True] + [False] * 2
        assert went_back["counts"] == {"nan": 1, "loss_spike": 0, "gradient_norm": 0, "skipped": 0, "rollbacks": 1}
        assert skipped["counts"] == {"nan": 1, "loss_spike": 0, "gradient_norm": 0, "skipped": 1, "rollbacks": 0}
        assert went_back["steps"] == (4, 4) == without_three["steps"]
        assert skipped["steps"] == (7, 6) and without_one["steps"] == (6, 6)
        assert same(went_back, without_three)
        # The step that was left out has drawn its dropout; a rollback takes that back too.
        assert same(skipped, without_one) == (DROPOUT not in went_back["modules"])


def stopping(plan: Plan, folder: str) -> Any:
    run = train(plan, folder, "stop")
    return (
        run["code"],
        len(run["skips"]),
        run["steps"],
        run["saved"],
        all(v.isfinite().all() for v in run["weights"].values()),
    )


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"shard": 2}], ids=str)
def test_all_ranks_stop_before_the_step(plan, tmp_path):
    assert run_ranks(stopping, 2, args=(plan, str(tmp_path))) == [(STOPPED, 4, (5, 4), ["checkpoint_0"], True)] * 2


def spike(folder: str) -> Any:
    """A loss that is a mean over tokens, in windows of two micro-batches; rank 1 alone reads the odd sample."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, split_batches=True,
        anomalies={"loss_spike": "skip", "gradient_norm": {"action": "log", "factor": 3}, "warmup": 3},
    )  # fmt: skip
    told: list[Any] = []
    accelerator.run.events.anomaly.subscribe(lambda anomaly: told.append(vars(anomaly)))
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows = torch.ones(24, 2)
    rows[19] = 40.0  # the last one of the fifth window's first micro-batch: rank 1's
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(rows), 2))
    skips, norms = [], []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().sum(), num_items=len(x))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            skips.append(accelerator.optimizer_step_was_skipped)
    with torch.no_grad():
        losses = accelerator.unwrap_model(model)(rows).square()
    return skips, told, losses[0].item(), losses[16:20].mean().item(), accelerator.anomaly_counts, norms[9]


def test_the_loss_is_the_mean_over_the_window_and_all_ranks(tmp_path):
    for skips, told, usual, odd, counts, norm in run_ranks(spike, 2, args=(str(tmp_path),)):
        assert skips == [False] * 4 + [True, False]
        assert counts == {"nan": 0, "loss_spike": 1, "gradient_norm": 1, "skipped": 1, "rollbacks": 0}
        loss, gradient = told
        assert {**loss, "text": ""} == {
            "step": 5, "what": "loss-spike", "value": pytest.approx(odd, rel=1e-6),
            "limit": pytest.approx(usual * 1.06, rel=1e-6), "action": "skip", "text": "",
        }  # fmt: skip
        assert gradient["what"] == "gradient-norm" and gradient["value"] == pytest.approx(norm, rel=1e-6)


def test_ranks_that_take_different_numbers_of_steps_are_refused():
    def joins() -> None:
        accelerator = Accelerator(cpu=True, anomalies={"nan": "skip"})
        with accelerator.join_uneven_inputs([]):
            pass

    with pytest.raises(RankFailed, match="anomaly-uneven"):
        run_ranks(joins, 2)


def test_ranks_with_steps_of_their_own_leave_out_the_same_ones():
    """Rank 1's third gradient is too large, and its fifth loss is NaN."""

    def trains() -> tuple[list[bool], list[int]]:
        accelerator = Accelerator(
            cpu=True, anomalies={"nan": "skip", "gradient_norm": {"factor": 3, "action": "skip"}, "warmup": 2}
        )
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        skips = []
        with LocalSGD(accelerator, model, local_sgd_steps=4) as local:
            for factor in (1.0, 1.0, 100.0, 1.0, torch.nan, 1.0):
                accelerator.backward(model(torch.ones(1, 2) * (factor if accelerator.process_index else 1.0)).mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                skips.append(accelerator.optimizer_step_was_skipped)
        counts = accelerator.anomaly_counts
        return skips, [counts["nan"], counts["gradient_norm"], counts["skipped"]]

    assert run_ranks(trains, 2) == [([False, False, True, False, True, False], [1, 1, 2])] * 2
