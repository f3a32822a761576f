"""What `deepspeed.initialize` makes from a config: optimizers and monitors."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from paceline import ConfigError, TrackerError
from paceline.testing import run_ranks
from paceline_deepspeed.config import read
from paceline_deepspeed.config_attributes import ConfigAttributes, get_monitor_config
from paceline_deepspeed.initialize import initialize
from paceline_deepspeed.monitors import MonitorMaster, Monitors
from paceline_deepspeed.muon import MuonWithAdam, set_optimizer_flags
from paceline_deepspeed.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    FusedAdam,
    FusedLamb,
    build,
)
from paceline_deepspeed.tiling import TiledLinear, TiledMLP
from paceline_large.optim.lamb import Lamb
from paceline_large.optim.lion import Lion


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]


# -- optimizers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "kind", "expected"),
    [
        ("Adam", {"lr": 0.1}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.999)}),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.3}, torch.optim.Adam, {"weight_decay": 0.3}),
        ("AdamW", {"betas": [0.8, 0.9], "eps": "auto"}, torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-8}),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        ("Lamb", {"max_coeff": 5.0}, Lamb, {"max_coeff": 5.0}),
        ("Lion", {"weight_decay": 0.1}, Lion, {"betas": (0.9, 0.999)}),
        ("Adagrad", {"lr": 0.5}, torch.optim.Adagrad, {"lr": 0.5}),
        ("SGD", {"lr": 0.5, "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
        ("RMSprop", {"alpha": 0.5}, torch.optim.RMSprop, {"alpha": 0.5}),
    ],
)
def test_a_type_and_its_params(name: str, params: dict, kind: type, expected: dict) -> None:
    made = build(name, params, parameters())
    assert type(made) is kind and expected.items() <= made.param_groups[0].items()


def test_muon_steps_matrices() -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "layer": nn.Linear(2, 3)})
    set_optimizer_flags(net)
    made = build("Muon", {"muon_lr": 0.2, "momentum": 0.8, "betas": [0.9, 0.99]}, net.parameters())
    assert type(made) is MuonWithAdam
    matrices, others = made.param_groups
    assert matrices["params"] == [net["layer"].weight] and (matrices["lr"], matrices["momentum"]) == (0.2, 0.8)
    assert others["params"] == [net["embedding"].weight, net["layer"].bias]
    assert (others["lr"], others["betas"]) == (3e-4, (0.9, 0.99))
    (alone,) = build("Muon", {}, [net["layer"].weight]).param_groups
    assert alone["use_muon"]
    with pytest.raises(ConfigError, match=r"deepspeed-optimizer\][\s\S]*2 of 4 parameters"):
        build("Muon", {}, [*net["layer"].parameters(), *parameters()])


def test_what_scripts_make_themselves() -> None:
    for made, kind in (
        (FusedAdam(parameters(), lr=0.1), torch.optim.AdamW),
        (FusedAdam(parameters(), adam_w_mode=False), torch.optim.Adam),
        (DeepSpeedCPUAdam(parameters(), adamw_mode=True), torch.optim.AdamW),
        (DeepSpeedCPUAdagrad(parameters()), torch.optim.Adagrad),
        (FusedLamb(parameters()), Lamb),
    ):
        assert type(made) is kind
    assert isinstance(FusedAdam(parameters()), FusedAdam) and not isinstance(FusedLamb(parameters()), FusedAdam)

    class Mine(FusedAdam):
        """A script may inherit."""

    assert type(Mine(parameters(), lr=0.1)) is Mine and isinstance(Mine(parameters()), Mine)
    assert not isinstance(FusedAdam(parameters()), Mine)


def test_arguments_that_do_nothing_here_are_refused() -> None:
    for wrong in (
        lambda: build("Adam", {"max_grad_norm": 1.0}, parameters()),
        lambda: build("Adam", {"bias_correction": False}, parameters()),
        lambda: build("Adam", {"momentum": 0.9}, parameters()),
        lambda: build("AdamX", {}, parameters()),
        lambda: build("Optimizer3", {}, parameters(), read({"train_batch_size": 1})),
        lambda: FusedLamb(parameters(), amsgrad=True),
    ):
        with pytest.raises(ConfigError, match="deepspeed-optimizer"):
            wrong()


def test_optimizers_that_look_at_whole_parameters_are_divided_all_the_same() -> None:
    def work() -> dict[tuple[str, int], torch.Tensor]:
        found = {}
        for name in ("Lamb", "Lion"):
            for stage in (0, 1, 2, 3):
                torch.manual_seed(0)
                keys = {
                    "train_batch_size": 4,
                    "optimizer": {"type": name, "params": {"lr": 0.01, "weight_decay": 0.1}},
                    "zero_optimization": {"stage": stage},
                }
                engine, *_ = initialize(model=nn.Linear(6, 4), config=keys)
                for row in torch.randn(3, 2, 6)[:, [engine.global_rank]]:
                    engine.backward(engine(row).square().mean())
                    engine.step()
                found[name, stage] = engine.module_state_dict()["weight"].clone()
        return found

    found = run_ranks(work, 2)[0]
    for (name, stage), weight in found.items():
        assert torch.allclose(weight, found[name, 0], atol=1e-6), (name, stage)


# -- monitors --------------------------------------------------------------------------------------------------


def test_events_in_csv_and_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    def work() -> None:
        block = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
        keys = {
            "train_batch_size": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "fp16": {"enabled": True, "initial_scale_power": 4},
            "csv_monitor": block,
            "tensorboard": {**block, "output_path": str(tmp_path / "board")},
        }
        engine, *_ = initialize(model=nn.Linear(2, 1), config=keys)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 2)).mean())
            engine.step()
        engine.monitor.write_events([("Own/value", torch.tensor(0.25), 7)])
        engine.destroy()

    run_ranks(work, 2)
    rows = {
        path.name: list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        for path in (tmp_path / "job").glob("*.csv")
    }
    assert rows["Train_Samples_lr.csv"] == [["step", "lr"], ["4", "0.5"], ["8", "0.5"]]
    assert rows["Train_Samples_loss_scale.csv"] == [["step", "loss_scale"], ["4", "16.0"], ["8", "16.0"]]
    assert rows["Own_value.csv"] == [["step", "value"], ["7", "0.25"]]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read_back = EventAccumulator(str(tmp_path / "board" / "job")).Reload()
    assert [(each.step, each.value) for each in read_back.Scalars("Train/Samples/lr")] == [(4, 0.5), (8, 0.5)]


def test_monitors_that_a_script_makes_itself(tmp_path: Path) -> None:
    def work() -> bool:
        block = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
        whole = ConfigAttributes({"train_batch_size": 2, "csv_monitor": block}).monitor_config
        other = get_monitor_config({"csv_monitor": {**block, "job_name": "other"}, "a key of the script": 1})
        assert other.enabled and other.csv_monitor.job_name == "other"
        for monitor_config in (whole, other):
            MonitorMaster(monitor_config).write_events([("Own/value", 0.25, 7)])
        return MonitorMaster(get_monitor_config({})).enabled

    assert run_ranks(work, 2) == [False, False]
    for job in ("job", "other"):
        assert (tmp_path / job / "Own_value.csv").read_text(encoding="utf-8").split() == ["step,value", "7,0.25"]


def test_a_monitor_whose_package_is_missing() -> None:
    keys = {"train_batch_size": 1, "wandb": {"enabled": True}, "comet": {"enabled": True}}
    with pytest.raises(TrackerError, match=r"2 problems") as raised:
        Monitors(read(keys), is_main=False)
    assert {problem.code for problem in raised.value.problems} == {"deepspeed-monitor"}
    assert "pip install wandb" in str(raised.value) and "comet_ml" in str(raised.value)
    assert not Monitors(read({"train_batch_size": 1, "wandb": {"enabled": False}}), is_main=True).enabled


def test_where_the_package_is_there(monkeypatch, tmp_path: Path) -> None:
    """The packages' own calls, which are few: what they are given."""
    for name, text in {
        "wandb": "calls = []\ndef init(**said): calls.append(said); return Run()\nclass Run:\n"
        "    id = 'a1'\n"
        "    def log(self, values, step): calls.append((values, step))\n"
        "    def finish(self, exit_code=0): calls.append(exit_code)\n",
        "comet_ml": "calls = []\ndef start(**said): calls.append(said); return Run()\nclass Run:\n"
        "    def get_key(self): return 'k1'\n"
        "    def set_name(self, name): calls.append(name)\n"
        "    def set_step(self, step): pass\n"
        "    def log_metric(self, name, value, step): calls.append((name, value, step))\n"
        "    def end(self): calls.append('end')\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # the ids of the runs are written down below it
    keys = {
        "train_batch_size": 1,
        "wandb": {"enabled": True, "team": "t", "group": "g", "project": "p"},
        "comet": {"enabled": True, "project": "p", "experiment_name": "e", "samples_log_interval": 10},
    }
    monitors = Monitors(read(keys), is_main=True)
    for step in (4, 8, 16):
        monitors.write_events([("Train/Samples/lr", 0.5, step)])
    monitors.finish()
    wandb, comet = (sys.modules.pop(name) for name in ("wandb", "comet_ml"))
    assert isinstance(wandb, ModuleType) and isinstance(comet, ModuleType)
    value = {"Train/Samples/lr": 0.5}
    assert wandb.calls == [
        {"project": "p", "group": "g", "entity": "t"}, (value, 4), (value, 8), (value, 16), 0,
    ]  # fmt: skip
    assert comet.calls == [{"project": "p"}, "e", ("Train/Samples/lr", 0.5, 4), ("Train/Samples/lr", 0.5, 16), "end"]


# -- layers in parts -------------------------------------------------------------------------------------------


class OverPositions(nn.Module):
    """Runs a module on all positions, or on some after the others."""

    def __init__(self, inner: nn.Module, shards: int) -> None:
        super().__init__()
        self.inner = inner
        self.shards = shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return TiledMLP.apply(lambda module, part: module.inner(part), self, x, self.shards)


def test_tiles_at_stage_3_train_as_whole_layers_do() -> None:
    def train(first: nn.Module, shards: int) -> list[torch.Tensor]:
        keys = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        torch.manual_seed(1)
        model = OverPositions(nn.Sequential(first, nn.Tanh(), nn.Linear(6, 8)), shards)
        engine = initialize(model=model, config=keys)[0]
        losses: list[torch.Tensor] = []
        for _ in range(3):
            loss = engine(torch.arange(16.0).reshape(1, 2, 8) / 16 + engine.global_rank).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return losses

    def work() -> None:
        torch.manual_seed(0)
        layer = nn.Linear(8, 6)
        tiled = TiledLinear(8, 6, in_splits=2, out_splits=3, init_linear=layer)
        torch.testing.assert_close(train(tiled, 2), train(layer, 1))

    run_ranks(work, 2)
