"""What becomes of a step with an anomaly, in one process."""

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, ConfigError, TrainError
from paceline.base.exits import STOPPED

BAD = 7  # the step whose sample has the value of `loop`


class Loop:
    """One epoch of 16 steps of one sample; the sample of step `BAD` is `value`."""

    def __init__(self, value: float = torch.nan, steps: int = 16, **arguments: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **arguments)
        torch.manual_seed(0)
        data = torch.rand(steps, 3) + 0.5
        data[BAD - 1] = value
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(TensorDataset(data))
        self.told: list[Any] = []
        self.accelerator.run.events.anomaly.subscribe(lambda anomaly: self.told.append(vars(anomaly)))
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared

    def run(self, after: Any = lambda step: None) -> list[int]:
        """Trains; returns the steps that were skipped."""
        skipped = []
        for step, (x,) in enumerate(self.loader, 1):
            self.accelerator.backward(self.model(x).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            if self.accelerator.optimizer_step_was_skipped:
                skipped.append(step)
            after(step)
        return skipped

    def state(self) -> list[Any]:
        return [
            value.clone() for value in (*self.model.parameters(), *self.optimizer.state[self.model.weight].values())
        ]


def test_nothing_is_joined_where_nothing_is_asked_for():
    loop = Loop(1.0)
    assert loop.accelerator.anomaly_counts == {} and loop.optimizer._admits is None
    assert not loop.accelerator.run.events.backward
    assert loop.run() == []


@pytest.mark.parametrize("action", ["log", "skip"])
def test_log_takes_the_step_and_skip_does_not(action, caplog):
    loop = Loop(1e4, anomalies={"loss_spike": action, "gradient_norm": action, "warmup": 4})
    before: list[Any] = []
    skipped = loop.run(lambda step: before.extend(loop.state()) if step == BAD - 1 else None)
    assert skipped == ([BAD] if action == "skip" else [])
    assert loop.optimizer.steps == 16 and loop.schedule.scheduler.last_epoch == 16 - len(skipped)
    assert [(line["step"], line["what"], line["action"]) for line in loop.told] == [
        (BAD, "loss-spike", action),
        (BAD, "gradient-norm", action),
    ]
    lines = [record.message for record in caplog.records if record.name == "paceline.anomalies"]
    assert len(lines) == 2 and all(f"Step {BAD}: the " in line for line in lines)
    assert lines[0].endswith("The step is taken." if action == "log" else "The step is left out.")


def test_statistics_outlive_a_restart(tmp_path):
    settings: dict[str, Any] = {"anomalies": {"loss_spike": "skip", "warmup": 5}, "project_dir": str(tmp_path)}
    whole = Loop(50.0, **settings)
    assert whole.run(lambda step: whole.accelerator.save_state() if step == 5 else None) == [BAD]
    resumed = Loop(50.0, **settings)
    resumed.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_0")
    assert resumed.run() == [BAD - 5]
    assert resumed.told == whole.told
    assert all(map(torch.equal, resumed.state(), whole.state()))


def test_a_window_that_was_saved_half_way_counts_in_neither_run(tmp_path):
    settings: dict[str, Any] = {"anomalies": {"loss_spike": "log", "warmup": 2}, "gradient_accumulation_steps": 2}

    def losses(loop: Loop, save: bool) -> list[float]:
        for number, (x,) in enumerate(loop.loader, 1):
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(x).square().mean())
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            if save and number == 5:
                loop.accelerator.save_state(tmp_path / "half")
        return loop.accelerator._observers["anomalies"].state_dict()["detectors"]["0"]["losses"]

    whole = losses(Loop(1.0, **settings), save=True)
    resumed = Loop(1.0, **settings)
    resumed.accelerator.load_state(tmp_path / "half")
    assert losses(resumed, save=False) == whole and len(whole) == 7


def test_a_rollback_goes_back_to_the_newest_checkpoint_of_this_run(tmp_path):
    Loop(
        1.0, project_dir=str(tmp_path)
    ).accelerator.save_state()  # of another run, which is none of this one's business
    loop = Loop(project_dir=str(tmp_path), anomalies={"nan": "rollback"})
    states: dict[int, Any] = {}

    def after(step: int) -> None:
        states[step] = loop.state()
        if step in (2, 4):
            loop.accelerator.save_state(background=step == 4)

    assert loop.run(after) == [BAD]
    assert all(map(torch.equal, states[BAD], states[4]))
    assert loop.optimizer.steps == 16 - 3 == loop.schedule.scheduler.last_epoch
    assert loop.accelerator.anomaly_counts["rollbacks"] == 1
    (line,) = loop.told
    assert line["text"].endswith("checkpoint_2 (step 4) and leaves out samples 4 to 6 of epoch 0.")
    loop.accelerator.end_training()


@pytest.mark.parametrize("otherwise", ["stop", "skip"])
def test_a_rollback_without_a_checkpoint(otherwise, tmp_path, caplog):
    loop = Loop(project_dir=str(tmp_path), anomalies={"nan": "rollback", "without_checkpoint": otherwise})
    if otherwise == "skip":
        assert loop.run() == [BAD]
    else:
        with pytest.raises(SystemExit) as left:
            loop.run()
        assert left.value.code == STOPPED and "anomaly-stop" in caplog.text
    assert "neither saved nor loaded a checkpoint" in caplog.text
    assert loop.told[0]["action"] == otherwise and not list(tmp_path.iterdir())


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_the_limit_stops_the_run(action, tmp_path, caplog):
    loop = Loop(project_dir=str(tmp_path), anomalies={"nan": action, "limit": 3})
    with torch.no_grad():
        loop.model.weight.fill_(torch.nan)
    loop.accelerator.save_state()
    with pytest.raises(SystemExit):
        loop.run()
    assert [line["action"] for line in loop.told] == [action] * 3 + ["stop"]
    assert "anomalies.limit=3 allows" in caplog.text
    assert loop.accelerator.anomaly_counts["nan"] == 4
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def test_an_overflow_of_fp16_is_the_loss_scalers_alone():
    """In step 3 a gradient overflows; in step `BAD` the loss itself is not finite."""
    loop = Loop(mixed_precision="fp16", anomalies={"nan": "skip"}, scaler={"init_scale": 2.0**8})
    scales = []
    hooks = []

    def after(step: int) -> None:
        scales.append(loop.accelerator.scaler.loss_scale)
        if step == 2:
            hooks.append(loop.model.weight.register_hook(lambda gradient: gradient * torch.inf))
        if step == 3:
            hooks.pop().remove()

    assert loop.run(after) == [3, BAD]
    assert loop.accelerator.anomaly_counts == {
        "nan": 1,
        "loss_spike": 0,
        "gradient_norm": 0,
        "skipped": 1,
        "rollbacks": 0,
    }
    assert scales == [2.0**8] * 2 + [2.0**7] * 14
    assert all(value.isfinite().all() for value in loop.state())
    with pytest.raises(TrainError, match="fp16-loss"):
        Loop(mixed_precision="fp16", anomalies={"nan": "log"}).run()


def test_a_spike_under_fp16_does_not_move_the_scale():
    anomalies = {"loss_spike": "skip", "warmup": 4}
    loop = Loop(100.0, mixed_precision="fp16", anomalies=anomalies, scaler={"init_scale": 1.0})
    assert loop.run() == [BAD]
    assert loop.told and loop.accelerator.scaler.loss_scale == 1.0


def test_optimizers_that_step_together_decide_together_and_others_apart():
    accelerator = Accelerator(cpu=True, anomalies={"loss_spike": "skip", "nan": "skip", "warmup": 3})
    models = [nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    x = torch.ones(4, 2)

    def step(scale: float, *stepping: Any) -> list[bool]:
        accelerator.backward(sum(model(x).square().mean() for model in models) * scale)
        for optimizer in stepping:
            optimizer.step()
        for optimizer in stepping:
            optimizer.zero_grad()
        return [optimizer.step_was_skipped for optimizer in stepping]

    for _ in range(4):
        assert step(1.0, first, second) == [False, False]
    assert step(torch.nan, first, second) == [True, True]
    assert accelerator.anomaly_counts["skipped"] == 1
    for _ in range(4):
        assert step(1000.0, second) == [False], "its own losses are of another size"
    assert step(1000.0, first) == [True]


def test_a_loss_that_the_script_threw_away_counts_for_no_step():
    loop = Loop(anomalies={"nan": "stop", "loss_spike": "stop", "warmup": 4})
    for step, (x,) in enumerate(loop.loader, 1):
        loop.accelerator.backward(loop.model(x).square().mean())
        if step != BAD:
            loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert sum(loop.accelerator.anomaly_counts.values()) == 0


def test_a_closure_is_refused():
    loop = Loop(1.0, anomalies={"nan": "skip"})
    with pytest.raises(TrainError, match="known only after the closure has run"):
        loop.optimizer.step(lambda: 0.0)


@pytest.mark.parametrize(
    ("anomalies", "words"),
    [
        ({"nan": "skp"}, ["[anomaly-options]", "expected: no, log, skip, rollback or stop"]),
        ({"nam": "skip"}, ["anomalies has no option called 'nam'", "write 'nan'"]),
        ({"loss_spike": {"deviations": -6}}, ["loss_spike_deviations cannot be -6", "a number above 0"]),
        ({"gradient_norm": {"factor": float("nan")}}, ["gradient_norm_factor cannot be nan"]),
        ({"loss_spike": {"deviation": 6}}, ["write 'loss_spike_deviations'"]),
        ({"limit": 0, "window": "x"}, ["limit cannot be 0", "window cannot be 'x'"]),
        ({"nan": "rollback"}, ["[anomaly-rollback]", "nan=rollback", "project_dir=None"]),
        ("skip", ["anomalies cannot be 'skip'"]),
    ],
)
def test_bad_options_are_refused_before_anything_runs(anomalies, words):
    with pytest.raises(ConfigError) as error:
        Accelerator(cpu=True, anomalies=anomalies)
    for word in words:
        assert word in str(error.value)


def test_the_environment_says_it_too(monkeypatch):
    monkeypatch.setenv("PACELINE_OPTIONS", "{anomalies: {nan: skip, loss_spike: {action: log, deviations: 4}}}")
    loop = Loop()
    assert loop.run() == [BAD] and loop.accelerator.anomaly_counts["nan"] == 1


@pytest.mark.needs("accelerate")
def test_a_script_of_accelerate_gets_them_from_the_command_line_but_no_rollback(monkeypatch, tmp_path):
    from paceline_accelerate.accelerator import Accelerator as Served

    monkeypatch.setenv("PACELINE_OPTIONS", "{anomalies: {nan: skip}}")
    accelerator = Served(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for value in (1.0, torch.nan, 1.0):
        accelerator.backward(model(torch.full((2, 2), value)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.anomaly_counts["skipped"] == 1 and model.weight.isfinite().all()
    monkeypatch.setenv("PACELINE_OPTIONS", "{anomalies: {nan: rollback}}")
    with pytest.raises(ConfigError, match="folder of accelerate's"):
        Served(cpu=True, project_dir=str(tmp_path))
