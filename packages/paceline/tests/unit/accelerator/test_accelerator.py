"""The facade in one process."""

import json
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, CheckpointError, PlanError, PrepareError


@pytest.fixture
def parts():
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    data = TensorDataset(torch.randn(10, 2), torch.randint(0, 2, (10,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(data, 4, shuffle=True)


def epoch(accelerator, model, optimizer, loader, stop=None):
    losses = []
    for number, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if stop is not None and number + 1 == stop:
            break
    return losses


def test_prepare_keeps_order_and_is_idempotent(parts):
    model, optimizer, loader = parts
    accelerator = Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    a, b, c, d, e = accelerator.prepare(schedule, loader, None, optimizer, model)
    assert a.scheduler is schedule and b.dataset is loader.dataset and c is None and d.optimizer is optimizer
    assert e is model
    assert accelerator.prepare(a, b, d, e) == (a, b, d, e)
    assert accelerator.prepare(loader) is b and accelerator.prepare(optimizer) is d
    assert accelerator.unwrap_model(e) is model


@pytest.mark.parametrize("strange", [3, "model", {"a": 1}, [1, 2], object()])
def test_what_cannot_be_prepared_is_named(strange):
    with pytest.raises(PrepareError, match=rf"of type {type(strange).__name__},.*\[prepare-kind\]"):
        Accelerator(cpu=True).prepare(strange)


def test_a_model_that_was_not_prepared_cannot_be_held():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PrepareError, match=r"\[model-unprepared\]"):
        accelerator.no_sync(nn.Linear(1, 1))


def test_a_plan_of_another_size_fails_before_anything_starts():
    with pytest.raises(PlanError, match=r"\[plan-size\]") as caught:
        Accelerator(cpu=True, plan={"replicate": 4})
    assert "--procs 4" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "code"),
    [({"replicate": {"comm_hook": "bf17"}}, "strategy-value"), ({"replicate": {"bucket": 3}}, "strategy-option")],
)
def test_options_of_replicate_are_checked_before_a_model_is_touched(options, code):
    from paceline.parallel.strategy import STRATEGIES
    from paceline.plan.facts import model_facts
    from paceline.plan.plan import Plan
    from paceline.plan.resolve import resolve
    from paceline.world.layout import Layout

    plan = Plan(layout=Layout(replicate=2), options=options)
    with pytest.raises(PlanError) as caught:
        resolve(plan, [model_facts(nn.Linear(1, 1))], STRATEGIES)
    assert caught.value.code == code


def test_backward_under_a_pipeline_names_what_works():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.run.prepared.models[0].chain.runner = object()
    with pytest.raises(PlanError, match=r"\[backward-pipeline\]"):
        accelerator.backward(torch.zeros(()))


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("stop", [2, None])
def test_a_run_resumes_with_the_next_sample_and_the_same_numbers(parts, tmp_path, stop, precision):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        accelerator = Accelerator(precision, cpu=True, data_seed=3, project_dir=tmp_path)
        return accelerator, *accelerator.prepare(model, optimizer, parts[2], schedule)

    accelerator, model, optimizer, loader, schedule = make()
    epoch(accelerator, model, optimizer, loader)
    for number, (x, y) in enumerate(loader):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        if number + 1 == stop:
            saved = accelerator.save_state()
    if stop is None:
        saved = accelerator.save_state()
    went_on = [p.clone() for p in model.parameters()]
    more = epoch(accelerator, model, optimizer, loader)

    accelerator, model, optimizer, loader, schedule = make()
    accelerator.load_state()
    if stop is not None:
        epoch(accelerator, model, optimizer, loader)
    assert saved.endswith("checkpoints/checkpoint_0")
    assert all(torch.equal(a, b) for a, b in zip(went_on, model.parameters(), strict=True))
    assert epoch(accelerator, model, optimizer, loader) == pytest.approx(more, abs=1e-6)
    assert accelerator.save_state().endswith("checkpoint_1")


def test_checkpoints_without_a_name_need_a_project(parts):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*parts)
    for call in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(CheckpointError, match=r"\[checkpoint-unnamed\]"):
            call()


def test_hooks_and_registered_objects_take_part(parts, tmp_path):
    class Counter:
        value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    accelerator, counter, seen = Accelerator(cpu=True), Counter(), []
    model, *_ = accelerator.prepare(*parts)
    accelerator.register_for_checkpointing(counter)
    with pytest.raises(CheckpointError):
        accelerator.register_for_checkpointing(object())
    handle = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: seen.append((models, len(weights)))
    )
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
    counter.value = 7
    saved = accelerator.save_state(tmp_path / "one")
    counter.value = 0
    accelerator.load_state(saved)
    handle.remove()
    handle.remove()
    accelerator.save_state(tmp_path / "two")
    assert counter.value == 7 and seen == [([model], 1), saved]


def test_a_hook_that_pops_a_model_saves_and_loads_it_itself(parts, tmp_path):
    accelerator = Accelerator(cpu=True)
    model, *_ = accelerator.prepare(*parts)

    def save(models, weights, folder):
        torch.save(weights.pop(), f"{folder}/mine.pt")

    def load(models, folder):
        models.pop().load_state_dict(torch.load(f"{folder}/mine.pt", weights_only=True))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    before = model.weight.detach().clone()
    saved = accelerator.save_state(tmp_path / "one")
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(saved)
    assert torch.equal(model.weight, before)


def test_models_and_objects_are_written(parts, tmp_path):
    accelerator = Accelerator(cpu=True)
    model, *_ = accelerator.prepare(*parts)
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save({"model": model.state_dict(), "n": 3}, tmp_path / "object.pth")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    assert torch.load(tmp_path / "object.pth", weights_only=True)["n"] == 3
    assert list(accelerator.get_state_dict(model)) == ["weight", "bias"]


def test_trackers_log_what_they_are_given(parts, tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("digits", {"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5)}, step=3)
    accelerator.get_tracker("jsonl")
    accelerator.end_training()
    (file,) = tmp_path.rglob("*.jsonl")
    assert any(json.loads(line).get("values") == {"loss": 0.5} for line in file.read_text().splitlines())


def test_forgetting_releases_everything(parts):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts)
    assert accelerator.free_memory(model, optimizer, loader) == [None] * 3
    assert not accelerator.run.prepared.models and not accelerator.run.prepared.optimizers


def test_clipping_inside_a_window_does_nothing(parts):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts)
    norms = []
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            norms.append((accelerator.sync_gradients, accelerator.clip_grad_norm_(model.parameters(), 1.0).item()))
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert [sync for sync, _ in norms] == [False, True, True]
    assert norms[0][1] == 0.0 and norms[1][1] > 0.0


def test_the_plan_says_where_each_value_came_from(caplog, parts):
    with caplog.at_level(logging.INFO, logger="paceline"):
        accelerator = Accelerator("bf16", cpu=True)
        accelerator.prepare(*parts)
    assert "mixed_precision = bf16  <- code" in accelerator.plan.explain()
    assert any("precision bf16" in record.getMessage() for record in caplog.records)
    assert "bf16" in repr(accelerator)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so of every profiler
def test_a_profile_is_written_for_the_rank(parts, tmp_path):
    accelerator = Accelerator(cpu=True)
    model, *_ = accelerator.prepare(*parts)
    with accelerator.profile(activities=["cpu"], output_trace_dir=tmp_path) as prof:
        model(torch.ones(1, 2))
    assert prof.key_averages() and (tmp_path / "profile_0.json").exists()


def test_only_uneven_schedules_speak(parts, caplog):
    model, optimizer, loader = parts
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, epochs=2, steps_per_epoch=len(loader))
    Accelerator(cpu=True).prepare(model, optimizer, loader, schedule)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
