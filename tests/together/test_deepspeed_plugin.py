"""accelerate's DeepSpeed: the plugin as recorded, a loop driven by our engine, and the errors of both."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.base.errors import ConfigError, TrainError
from paceline.testing import run_ranks

REFERENCE = Path(__file__).parent / "reference"
RECORDED = json.loads((REFERENCE / "recorded_deepspeed.json").read_text(encoding="utf-8"))["plugin"]


def served_facts():
    """The recorded program where accelerate's names are served."""
    import sys

    from paceline.compat import install

    install(["accelerate"])
    sys.path.insert(0, str(REFERENCE))
    import deepspeed_plugin_program

    return json.loads(json.dumps(deepspeed_plugin_program.run_all()))


@pytest.fixture(scope="module")
def facts():
    return run_ranks(served_facts, world=1, group=False, timeout_s=60)[0]


@pytest.mark.parametrize("part", sorted(RECORDED))
def test_as_recorded(facts, part: str) -> None:
    assert facts[part] == RECORDED[part]


# -- a loop of accelerate's ------------------------------------------------------------------------------------------


def _objects(seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)
    return model, optimizer, scheduler, loader


def _weights(state) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in state.items()}


def loop(deepspeed, folder: str = "", resume: bool = False, precision: str = "no", clip: bool = True):
    """Steps with accumulation; with a folder the state is saved after the first epoch, and loaded where it resumes."""
    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(**deepspeed) if deepspeed else None
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=plugin, mixed_precision=precision
    )
    model, optimizer, scheduler, loader = accelerator.prepare(*_objects())
    if resume:
        accelerator.load_state(folder)
    norms = []
    for epoch in range(1 if resume else 2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(inputs) - targets).square().mean())
                if accelerator.sync_gradients and clip:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if folder and not resume and epoch == 0:
            accelerator.save_state(folder)
    return {
        "weights": _weights(accelerator.get_state_dict(model)),
        "norms": norms,
        "rate": optimizer.param_groups[0]["lr"],
        "type": str(accelerator.distributed_type),
        "kinds": [type(value).__name__ for value in (model, optimizer, scheduler)],
        "unwrapped": type(accelerator.unwrap_model(model)).__name__,
    }


PLUGINS = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3, "zero3_save_16bit_model": True},
    "offloaded": {"zero_stage": 3, "zero3_save_16bit_model": True, "offload_optimizer_device": "cpu",
                  "offload_param_device": "cpu"},
}  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    """The same loop without DeepSpeed, by the number of processes."""
    return {size: run_ranks(loop, size, args=({},), timeout_s=60)[0] for size in (1, 2)}


@pytest.mark.parametrize("name", sorted(PLUGINS))
@pytest.mark.parametrize("size", [1, 2])
def test_a_loop_has_the_numbers_of_ddp(plain, size: int, name: str, tmp_path: Path) -> None:
    plugin = {**PLUGINS[name], "gradient_clipping": 1.0}
    found = run_ranks(loop, size, args=(plugin, str(tmp_path / "state")), timeout_s=60)
    assert found[0]["type"] == "DistributedType.DEEPSPEED" and found[0]["unwrapped"].endswith("Sequential")
    assert found[0]["kinds"] == ["DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "AcceleratedScheduler"]
    assert found[0]["rate"] == plain[size]["rate"]
    assert found[0]["norms"] == pytest.approx(plain[size]["norms"], rel=1e-5)
    for key, values in plain[size]["weights"].items():
        assert found[0]["weights"][key] == pytest.approx(values, abs=1e-6)
    assert {"pytorch_model", "random_states_0.pkl"} <= {path.name for path in (tmp_path / "state").iterdir()}
    resumed = run_ranks(loop, size, args=(plugin, str(tmp_path / "state"), True), timeout_s=60)[0]
    assert resumed["weights"] == found[0]["weights"], "it goes on where it was saved"


def test_bf16_reaches_the_engine() -> None:
    found = run_ranks(loop, 1, args=({"zero_stage": 2}, "", False, "bf16", False), timeout_s=60)[0]
    exact = run_ranks(loop, 1, args=({"zero_stage": 2}, "", False, "no", False), timeout_s=60)[0]
    assert found["weights"] != exact["weights"]


# -- several plugins, stand-ins, errors ---------------------------------------------------------------------------------


def cases() -> dict[str, object]:
    """What a script can do with plugins, one after another in one process."""
    from paceline_accelerate.accelerator import Accelerator
    from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin, get_active_deepspeed_plugin
    from paceline_accelerate.deepspeed_wrappers import (
        DummyOptim,
        DummyScheduler,
        map_pytorch_optim_to_deepspeed,
    )
    from paceline_accelerate.state import AcceleratorState

    found: dict[str, object] = {}

    def code_of(work) -> str:
        with pytest.raises((ConfigError, TrainError, ValueError)) as caught:
            work()
        return str(getattr(caught.value, "code", type(caught.value).__name__))

    def fresh(**config):
        AcceleratorState._reset_state(reset_partial_state=True)
        given = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", **config}
        return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given))

    found["no file"] = DeepSpeedPlugin(hf_ds_config="none").zero_stage
    found["without"] = code_of(lambda: get_active_deepspeed_plugin(Accelerator(cpu=True).state))
    several = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, deepspeed_plugins=several)
    stages = [accelerator.deepspeed_plugin.zero_stage]
    student, _, _ = accelerator.prepare(*_objects()[:2], _objects()[3])
    # Also one that is prepared later leaves out a step that the engine has skipped.
    found["schedules"] = accelerator.prepare(_objects()[2]).optimizers == accelerator._optimizers
    accelerator.state.select_deepspeed_plugin("teacher")
    stages.append(get_active_deepspeed_plugin(accelerator.state).zero_stage)
    second = Accelerator(cpu=True)
    teacher, _ = second.prepare(_objects(3)[0], _objects()[3])
    found["several"] = [*stages, student.zero_optimization_stage(), teacher.zero_optimization_stage()]
    found["second"] = second.state.get_deepspeed_plugin("student") is several["student"]

    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                      "warmup_num_steps": "auto", "total_num_steps": "auto"}}  # fmt: skip
    accelerator = fresh(optimizer=optimizer, scheduler=scheduler)
    model, _, _, loader = _objects()
    dummy = DummyOptim(model.parameters(), lr=0.25, weight_decay=0.1)
    engine, prepared, _, _ = accelerator.prepare(model, dummy, DummyScheduler(dummy, 10), loader)
    values = engine.config
    found["dummies"] = [values["optimizer.params"]["lr"], values["scheduler.params"]["total_num_steps"],
                        values["scheduler.params"]["warmup_num_steps"],
                        values["train_micro_batch_size_per_gpu"], type(prepared.optimizer.optimizer).__name__]  # fmt: skip

    model, real, _, loader = _objects()
    found["both"] = code_of(lambda: fresh(optimizer=optimizer).prepare(model, real, loader))
    found["neither"] = code_of(lambda: fresh().prepare(model, DummyOptim(model.parameters()), loader))
    found["no scheduler"] = code_of(lambda: fresh().prepare(model, real, DummyScheduler(real), loader))
    found["no batch size"] = code_of(lambda: fresh().prepare(model, real))
    found["two models"] = code_of(lambda: fresh().prepare(model, _objects()[0], real, loader))
    accelerator = fresh(zero_optimization={"stage": 3})
    engine, _, _ = accelerator.prepare(model, real, loader)
    found["not whole"] = code_of(lambda: accelerator.get_state_dict(engine))
    found["clip value"] = code_of(lambda: accelerator.clip_grad_value_(engine.parameters(), 1.0))
    accelerator.free_memory()
    found["freed"] = [len(accelerator._models), accelerator.deepspeed_engine_wrapped]

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    model, real, _, loader = _objects()
    engine, _, _ = fresh(gradient_accumulation_steps=2).prepare(model, real, loader)
    engine(torch.ones(8, 4))  # two rows for each sample, as in trl's DPO
    found["warnings"] = said

    found["mapped"] = type(map_pytorch_optim_to_deepspeed(torch.optim.Adam([torch.ones(1)]))).__name__
    found["not mapped"] = code_of(lambda: map_pytorch_optim_to_deepspeed(torch.optim.SGD([torch.ones(1)])))
    return found


def test_plugins_and_stand_ins() -> None:
    assert run_ranks(cases, 1, timeout_s=60)[0] == {
        "no file": 2,
        "without": "deepspeed-plugin",
        "several": [2, 3, 2, 3],
        "second": True,
        "schedules": True,
        "dummies": [0.25, 10, 1, 4, "AdamW"],
        **dict.fromkeys(
            ("both", "neither", "no scheduler", "no batch size", "two models", "not whole"), "deepspeed-prepare"
        ),
        "clip value": "deepspeed-step",
        "freed": [0, None],
        "warnings": [],
        "mapped": "Adam",
        "not mapped": "deepspeed-optimizer",
    }
