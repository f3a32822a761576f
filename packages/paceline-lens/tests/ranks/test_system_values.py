"""What `log_system=True` adds to the log, on two ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.testing import run_ranks
from paceline_lens.observe import system_values

ROWS, BATCH, WIDTH = 48, 8, 16


class Kept:
    """A tracker that keeps what it is given."""

    name = "kept"

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def start(self, run: str, config: Any) -> None: ...

    def log(self, values: Any, step: int | None) -> None:
        self.logged.append(dict(values))

    def finish(self, status: str) -> None: ...


def train(plan: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Six steps in windows of two micro-batches (of 4 rows on each rank), logged after the second, the fourth and the last."""
    tracker = Kept()
    accelerator = Accelerator(
        cpu=True, plan=plan, log_with=tracker, split_batches=True, gradient_accumulation_steps=2, **more
    )  # fmt: skip
    accelerator.init_trackers("run")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(2 * ROWS, WIDTH)), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum(), num_items=3 * len(x))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and optimizer.steps in (1, 2, 4, 6):
            accelerator.log({"step": optimizer.steps})
            accelerator.log({"again": 1})
    accelerator.end_training()
    return tracker.logged


def with_a_peak(plan: dict[str, Any], profile: str) -> Any:
    system_values.peak_flops_of = lambda model, precision: 1e9
    return train(plan, log_system=True, profile=profile)


@pytest.mark.parametrize(("plan", "profile"), [({}, "wall-clock"), ({"shard": 2}, "no")], ids=["replicate", "shard"])
def test_the_numbers_are_those_of_all_ranks(plan, profile):
    main, other = run_ranks(with_a_peak, 2, args=(plan, profile))
    assert other == []
    assert [set(values) for values in main[1::2]] == [{"again"}] * 4, "no step has ended since"
    first, *rest = main[::2]
    assert set(first) == {"step"}, "the first step builds and connects, and is not measured"
    for values in rest:
        steps = values["system/steps_per_second"]
        assert values["system/samples_per_second"] / steps == pytest.approx(2 * BATCH)
        assert values["system/tokens_per_second"] / steps == pytest.approx(3 * 2 * BATCH)
        assert values["system/memory_peak_bytes_of_all"] >= values["system/memory_peak_bytes"] > 1 << 20
        shares = [value for name, value in values.items() if name.startswith("system/share_")]
        assert sum(shares) == pytest.approx(1.0 if profile == "wall-clock" else 0.0)
        # Forward 2 operations for each weight and row; backward the same again for weights, and for the second's input.
        flops = 2 * BATCH * (2 * (WIDTH**2 + WIDTH) + 2 * (WIDTH**2 + WIDTH) + 2 * WIDTH)
        assert values["system/mfu"] == pytest.approx(flops * steps / 2e9)


def test_an_unknown_peak_is_said_once_and_nothing_is_joined_where_nothing_is_asked_for(caplog):
    logged = train({}, log_system=True)
    assert all("system/mfu" not in values for values in logged) and "system/steps_per_second" in logged[2]
    assert "system/memory_peak_bytes" in logged[2] and "system/memory_peak_bytes_of_all" not in logged[2]
    said = [record.message for record in caplog.records if "system/mfu" in record.message]
    assert said == ["system/mfu is left out of the log: the peak of this device (cpu) is not known."]
    assert all(len(values) == 1 for values in train({}))


def test_the_environment_asks_for_it_too(monkeypatch):
    monkeypatch.setenv("PACELINE_LOG_SYSTEM", "yes")
    assert "system/steps_per_second" in train({})[2]
