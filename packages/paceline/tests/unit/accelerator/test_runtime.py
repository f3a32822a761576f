"""What a run takes from its surroundings is looked up once, and can be something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.world import runtime


class Recorded(runtime.Runtime):
    """Surroundings that keep no files, and note what happens."""

    keeps_files = False

    def __init__(self) -> None:
        self.events: list[str] = []

    def collectives(self, world: Any, device: Any) -> None:
        self.events.append("collectives")

    def begin(self, run: Any) -> None:
        self.run = run
        run.events.preparing.subscribe(lambda models: self.events.append(f"preparing {len(models)}"))
        run.events.prepared.subscribe(lambda models: self.events.append(f"prepared {len(models)}"))
        run.events.stepped.subscribe(self.stepped)

    def batches(self, steps: Iterator[Any]) -> Iterator[Any]:
        for step in steps:
            self.events.append("batch")
            yield step

    def stepped(self, optimizer: Any) -> None:
        window = self.run.gradients
        self.events.append(f"step {optimizer.steps} of {sum(window.batch.real)} samples, declared: {window.declared}")


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    before = runtime.current()
    surroundings = Recorded()
    runtime.use(surroundings)
    yield surroundings
    runtime.use(before)


def train(folder: Path) -> Accelerator:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=str(folder / "run"))
    accelerator.init_trackers("run")
    model = nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=3)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    for (rows,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.log({"loss": 1.0})
    return accelerator


def test_a_run_takes_everything_from_its_runtime(recorded: Recorded, tmp_path: Path) -> None:
    train(tmp_path).end_training()
    step = "of 3 samples, declared: True"
    assert recorded.events == [
        "collectives", "preparing 1", "prepared 1", "batch", f"step 1 {step}", "batch", f"step 2 {step}",
    ]  # fmt: skip


def test_nothing_is_written_where_no_files_are_kept(recorded: Recorded, tmp_path: Path) -> None:
    accelerator = train(tmp_path)
    assert accelerator.save_state() == "checkpoint" and accelerator.save_state(tmp_path / "mine") == str(
        tmp_path / "mine"
    )
    accelerator.save({"one": 1}, tmp_path / "object")
    accelerator.save_model(nn.Linear(2, 2), tmp_path / "model")
    accelerator.load_state(tmp_path / "nowhere")
    assert accelerator.resume().path is None
    accelerator.end_training()
    assert list(tmp_path.iterdir()) == []


def test_a_real_run_writes(tmp_path: Path) -> None:
    accelerator = train(tmp_path)
    folder = accelerator.save_state()
    accelerator.end_training()
    assert folder is not None and Path(folder).is_dir()


@pytest.mark.needs("lens")
def test_the_profile_is_written_where_the_last_save_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, profile="wall-clock", project_dir=str(tmp_path))
    monkeypatch.setattr(accelerator.states, "wait", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerator.end_training()
    assert (tmp_path / "profile.jsonl").exists()
