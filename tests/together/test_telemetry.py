"""What a rank writes into the journal, and that it writes nothing unless it was asked to."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from parity_models import Experts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline_accelerate.accelerator import Accelerator as ServedAccelerator
from paceline_lens.observe import phases as phases_module
from paceline_lens.observe import telemetry as module
from paceline_lens.observe import watching
from paceline_lens.observe.phases import Phases
from paceline_lens.observe.telemetry import StepProgress, Telemetry
from paceline_lens.watch.journal import JournalReader, JournalWriter, RunHeader, rank_file, write_header
from paceline_lens.watch.records import CheckpointSaved, Hello, JournalRecord, PlanMade, Tick, ValuesLogged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_header(tmp_path, RunHeader())
    return tmp_path


STEP_3 = StepProgress(step=3)


def telemetry_in(folder: Path, progress: StepProgress = STEP_3, *, main: bool = True) -> Telemetry:
    return Telemetry(JournalWriter(folder / rank_file(0)), Phases(), lambda: progress, lambda: (10, 20), main=main)


def written(folder: Path, kind: type[JournalRecord]) -> list[JournalRecord]:
    return [line.record for line in JournalReader(folder).read() if isinstance(line.record, kind)]


def test_the_times_of_the_phases_sum_to_the_time_that_passed(folder: Path) -> None:
    telemetry = telemetry_in(folder)
    phases = telemetry._phases
    began = time.perf_counter()
    for phase in ("data", "forward", "step"):
        with phases.during(phase):
            time.sleep(0.002)
    phases.enter("backward")
    time.sleep(0.002)
    telemetry._tick()
    phases.leave()
    telemetry.finish()
    passed_ms = (time.perf_counter() - began) * 1000
    first, second = written(folder, Tick)
    assert isinstance(first, Tick)
    assert isinstance(second, Tick)
    assert (first.step, first.steps, second.steps) == (3, 1, 0)
    assert (first.phase, second.phase) == ("backward", "rest")
    assert (first.memory, first.memory_peak) == (10, 20)
    assert first.ms.keys() >= {"data", "forward", "step", "backward"}
    total_ms = sum(first.ms.values()) + sum(second.ms.values())
    assert total_ms == pytest.approx(passed_ms, abs=5)


def test_sums_that_two_threads_have_mixed_up_hold_again(folder: Path) -> None:
    telemetry = telemetry_in(folder)
    telemetry._phases._ns["forward"] += 1_000_000_000  # as of a second thread that was between the same two statements
    telemetry._tick()
    telemetry._phases.enter("data")
    telemetry._tick()
    telemetry.finish()
    ticks = [tick for tick in written(folder, Tick) if isinstance(tick, Tick)]
    assert [sum(tick.ms.values()) < 500 for tick in ticks] == [False, True, True]


def test_a_forked_process_ends_nothing(folder: Path) -> None:
    telemetry = telemetry_in(folder)
    with telemetry._tick_lock:  # as the thread may hold it at that moment
        child = os.fork()
        if child == 0:
            telemetry.finish()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    telemetry.finish()
    assert len(written(folder, Tick)) == 1


def test_values_are_numbers(folder: Path) -> None:
    telemetry = telemetry_in(folder, StepProgress(step=3, loss_scale=1024.0, skipped_steps=2))
    loss = torch.tensor([1.5])
    telemetry.log({"loss": loss, "nan": math.nan, "yes": True, "text": "a", "many": torch.ones(2), "huge": 10**400}, 7)
    telemetry.log({"array": np.ones(2)})
    loss += 1  # what was logged stays what it was
    telemetry.log({"text": "b"})
    telemetry.clipped(torch.tensor(4.0))
    telemetry.finish()
    logged, gradients = written(folder, ValuesLogged)
    assert isinstance(logged, ValuesLogged)
    assert math.isnan(logged.values.pop("nan"))
    assert logged == ValuesLogged(7, {"loss": 1.5, "yes": 1.0})
    assert gradients == ValuesLogged(3, {"grad_norm": 4.0, "loss_scale": 1024.0, "skipped_steps": 2.0})


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7.5], ids=["NumPy", "tensor", "float"])
def test_a_step_may_be_any_number(folder: Path, step: int) -> None:
    telemetry = telemetry_in(folder)
    telemetry.log({"loss": 1.5}, step)
    telemetry.finish()
    assert written(folder, ValuesLogged) == [ValuesLogged(7, {"loss": 1.5})]


def test_of_many_values_the_last_of_each_name_is_kept(folder: Path) -> None:
    telemetry = telemetry_in(folder)
    for step in range(100):
        telemetry.log({"even" if step % 2 == 0 else "odd": step}, step)
    telemetry.finish()
    lines = written(folder, ValuesLogged)
    assert len(lines) == 20
    assert lines[-1] == ValuesLogged(99, {"odd": 99.0, "even": 98.0})


def test_of_many_names_the_first_are_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = telemetry_in(folder)
    for _ in range(2):
        telemetry.log({f"value {number}": number for number in range(10_000)})
    telemetry.finish()
    lines = written(folder, ValuesLogged)
    assert [len(line.values) for line in lines if isinstance(line, ValuesLogged)] == [1000, 1000]


def test_other_ranks_write_no_values(folder: Path) -> None:
    telemetry = telemetry_in(folder, main=False)
    telemetry.log({"loss": 1.0})
    telemetry.clipped(torch.tensor(4.0))
    telemetry.finish()
    assert written(folder, ValuesLogged) == []
    assert len(written(folder, Tick)) == 1


def test_a_rank_that_waits_says_where(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAITS_S", 0.0)
    monkeypatch.setattr(module, "_PERIOD_S", 0.02)
    telemetry = telemetry_in(folder)
    telemetry.start()
    telemetry._phases.enter("data")
    time.sleep(0.1)
    telemetry.finish()
    ticks = written(folder, Tick)
    assert any(
        tick.phase == "data" and tick.at.startswith("test_telemetry.py:") for tick in ticks if isinstance(tick, Tick)
    )


def test_a_full_disk_ends_no_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = telemetry_in(folder)

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(telemetry._writer, "write", full)
        telemetry._tick()
        telemetry._tick()
    assert caplog.text.count("No space left") == 1
    telemetry.finish()
    assert len(written(folder, Tick)) == 1


# -- joined to a run -----------------------------------------------------------------------------------------------


def train(accelerator: Accelerator, steps: int = 4) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.ones(4 * steps, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        loss = model(batch).sum()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss})


def test_a_run_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path / "watch"))
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator)
    accelerator.save_state()
    accelerator.end_training()
    reader = JournalReader(tmp_path / "watch")
    assert reader.header.procs == 1
    lines = [line.record for line in reader.read()]
    kinds = [record.kind for record in lines]
    assert kinds[0] == "hello"
    hello, plan = lines[0], next(record for record in lines if isinstance(record, PlanMade))
    assert isinstance(hello, Hello)
    assert (hello.rank, hello.device) == (0, "cpu")
    assert plan.text.startswith("plan:")
    assert plan.memory_bytes
    checkpoint = next(record for record in lines if isinstance(record, CheckpointSaved))
    assert (checkpoint.step, checkpoint.ok) == (4, True)
    assert checkpoint.bytes
    assert checkpoint.stall_s == checkpoint.save_s
    ticks = [record for record in lines if isinstance(record, Tick)]
    assert (ticks[-1].step, ticks[-1].samples) == (4, 16)
    assert sum(tick.steps for tick in ticks) == 4
    spent = {phase for tick in ticks for phase in tick.ms}
    assert spent >= {"data", "forward", "backward", "clip", "step", "checkpoint", "rest"}
    values = [record for record in lines if isinstance(record, ValuesLogged)]
    assert sum("loss" in record.values for record in values) == 4
    assert any("grad_norm" in record.values for record in values)


def test_a_save_that_fails_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path / "watch"))
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    train(accelerator)
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="is a file"):
        accelerator.save_state(tmp_path / "file")
    accelerator.end_training()
    (checkpoint,) = written(tmp_path / "watch", CheckpointSaved)
    assert isinstance(checkpoint, CheckpointSaved)
    assert (checkpoint.ok, checkpoint.bytes) == (False, None)
    assert "is a file" in checkpoint.reason


def test_a_process_records_the_run_that_prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path))
    unused = Accelerator(cpu=True)
    accelerator = Accelerator(cpu=True)
    train(accelerator)
    beside = Accelerator(cpu=True)
    assert unused.run.phases is not None
    assert beside.run.phases is None
    accelerator.end_training()
    assert max(tick.step for tick in written(tmp_path, Tick) if isinstance(tick, Tick)) == 4


def test_nothing_is_joined_unless_it_is_asked_for() -> None:
    threads = threading.active_count()
    accelerator = Accelerator(cpu=True)
    assert threading.active_count() == threads
    assert accelerator.run.phases is None
    assert not accelerator.run.events.phase.is_followed
    assert not accelerator.run.events.logged
    assert not accelerator.run.events.clipped
    files = set()
    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    train(accelerator)
    sys.setprofile(None)
    assert any("/paceline/" in file for file in files)
    assert not files & {phases_module.__file__, module.__file__}


def test_a_folder_that_cannot_be_written_to_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path / "file" / "watch"))
    accelerator = Accelerator(cpu=True)
    assert accelerator.run.phases is None
    assert "not recorded" in caplog.text


def test_the_operations_of_one_step_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path))
    monkeypatch.setattr(watching, "peak_flops_of", lambda model, precision: 1e12)  # as of a device that our table knows
    accelerator = Accelerator(cpu=True)
    train(accelerator)
    accelerator.end_training()
    plans = [plan.flops for plan in written(tmp_path, PlanMade) if isinstance(plan, PlanMade)]
    forward, backward = 2 * 4 * 4 * 2, 2 * 4 * 4 * 2  # of Linear(4, 2) and 4 rows; the inputs need no gradients
    assert plans == [None, forward + backward]


def test_the_load_of_experts_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path))

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Of 8 choices, 5 are of expert 0, 2 of expert 1, 1 of expert 2.
            return self.experts(x, torch.tensor([[0, 1], [0, 1], [0, 2], [0, 0]]), torch.ones(4, 2))

    accelerator = Accelerator(cpu=True)
    model = Routed()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(4, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    deepcopy(accelerator.unwrap_model(model))(torch.ones(4, 4))  # a copy tells nobody
    accelerator.end_training()
    values = {}
    for record in written(tmp_path, ValuesLogged):
        assert isinstance(record, ValuesLogged)
        values |= record.values
    assert values["experts/busiest"] == 2.5 and values["experts/idlest"] == 0


def test_a_compiled_model_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path))
    monkeypatch.setattr(watching, "peak_flops_of", lambda model, precision: 1e12)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.compile(nn.Linear(4, 2), backend="eager"))
    assert accelerator.run.phases is not None
    assert accelerator.run.phases.listeners == []
    accelerator.end_training()


def test_the_peak_of_a_device() -> None:
    assert watching.peak_flops_of("NVIDIA H200", "bf16") == 989e12
    assert watching.peak_flops_of("NVIDIA A100-SXM4-80GB", "no") == 19.5e12
    assert watching.peak_flops_of("NVIDIA GeForce RTX 4090", "bf16") is None
    assert watching.peak_flops_of("", "no") is None


def test_values_that_are_logged_through_accelerates_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_WATCH_DIR", str(tmp_path))
    accelerator = ServedAccelerator(cpu=True)
    accelerator.log({"loss": 2.0}, step=7)
    accelerator.end_training()
    assert written(tmp_path, ValuesLogged) == [ValuesLogged(7, {"loss": 2.0})]
