"""Folders that the real DeepSpeed 0.19.8 wrote on two processes: here they go on at any width and stage.

`deepspeed_reference/checkpoints/record.py` made them, and recorded the losses of the runs that it did not interrupt.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from paceline import Accelerator
from paceline.base.errors import CheckpointError
from paceline.checkpoint.weights.export import export_checkpoint
from paceline.checkpoint.weights.model import load_model
from paceline.testing import run_ranks
from paceline_deepspeed import schedules
from paceline_deepspeed.checkpoint_format_files import DeepSpeedFolder
from paceline_deepspeed.checkpoint_format_state import _scaler_state
from paceline_deepspeed.checkpoint_format_universal import open_folder
from paceline_deepspeed.consolidation import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from paceline_deepspeed.ds_to_universal import convert, main, parse_arguments
from paceline_deepspeed.initialize import initialize

_HERE = Path(__file__).parent / "deepspeed_reference" / "checkpoints"
_LOSSES = json.loads((_HERE / "losses.json").read_text())
_spec = importlib.util.spec_from_file_location("recorded_checkpoints", _HERE / "record.py")
record = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(record)
_NAMES = list(_LOSSES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("folders")
    with tarfile.open(_HERE / "folders.tar.xz") as archive:
        archive.extractall(where, filter="data")
    return where


def _go_on(folder: str, plan: dict, precision: str) -> tuple[list[float], dict, int]:
    """Losses of the recorded run's second half, from its checkpoint, as a program of ours computes them."""
    torch.manual_seed(1)
    accelerator = Accelerator(plan={**plan, "mixed_precision": "bf16" if precision == "bf16" else "no"}, cpu=True)
    model = record.Net()
    optimizer = torch.optim.AdamW(record.groups(model), lr=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    params = record.config(0, precision)["scheduler"]["params"]
    scheduler = schedules.build("WarmupLR", optimizer.optimizer, params)
    accelerator.load_state(folder)
    own = accelerator.states.counters.extra["deepspeed"]
    scheduler.load_state_dict(own["lr_scheduler"])
    width, rank = accelerator.num_processes, accelerator.process_index
    losses = []
    for step in range(record.STEPS, 2 * record.STEPS):
        rows = record.batch(step)[rank * 8 // width : (rank + 1) * 8 // width]
        loss = model(rows).float().square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, own, accelerator.states.counters.step


@pytest.mark.parametrize("name", _NAMES)
def test_a_folder_of_deepspeed_goes_on_as_if_it_had_not_stopped(folders, name):
    folder, precision = str(folders / name / "global_step4"), name.partition("_")[2]
    tolerance = 1e-6 if precision == "fp32" else 3e-3
    plans = {"stage0": (1, {}), "stage1": (2, {"shard": 2, "zero": 2}), "stage2": (4, {"shard": 4, "zero": 3}),
             "stage3": (1, {})}  # fmt: skip
    world, plan = plans[name.partition("_")[0]]
    for losses, own, step in run_ranks(_go_on, world=world, args=(folder, plan, precision)):
        assert losses == pytest.approx(_LOSSES[name][record.STEPS :], abs=tolerance)
        assert own["client_state"] == {"epoch": 3, "note": "kept"}
        assert own["counters"] == {"global_steps": 4, "global_samples": 32, "skipped_steps": 0}
        assert step == 4


def _engine_goes_on(folder: str, stage: int, tag: str = "global_step4") -> tuple[list[float], dict, tuple]:
    """The recorded script itself, on our engine."""
    torch.manual_seed(1)
    model = record.Net()
    optimizer = torch.optim.AdamW(record.groups(model), lr=0.5)
    told = record.config(stage, "fp32") | {"checkpoint": {"load_universal": True}}
    world = dist.get_world_size()
    told["train_micro_batch_size_per_gpu"] = 8 // world
    engine = initialize(model=model, optimizer=optimizer, config=told)[0]
    path, client = engine.load_checkpoint(folder)
    assert path == os.path.join(folder, tag)
    losses = []
    for step in range(record.STEPS, 2 * record.STEPS):
        loss = engine(record.batch(step).chunk(world)[dist.get_rank()]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.accelerator.reduce(loss.detach(), "mean")))
    return losses, client, (engine.global_steps, engine.global_samples, engine.skipped_steps)


@pytest.mark.parametrize(
    ("name", "world", "stage"), [("stage2_fp32", 1, 0), ("stage3_fp32", 4, 2), ("stage0_fp32", 2, 3)]
)
def test_the_recorded_script_goes_on(folders, name, world, stage):
    for losses, client, counters in run_ranks(_engine_goes_on, world=world, args=(str(folders / name), stage)):
        assert losses == pytest.approx(_LOSSES[name][record.STEPS :], abs=1e-6)
        assert client == {"epoch": 3, "note": "kept"}
        assert counters == (8, 64, 0)


def _universal(where: Path, folder: Path) -> None:
    """Writes what DeepSpeed's `ds_to_universal` makes of a folder: a file for each tensor of a parameter, and common state."""
    saved = open_folder(str(folder))
    moments, others = saved.moments()
    shutil.copytree(folder, where, ignore=shutil.ignore_patterns("*_optim_states.pt"))
    for name, shape in saved.trained.items():
        of_parameter = where / "zero" / name
        of_parameter.mkdir(parents=True)
        for key, value in {"fp32": saved.weights, **moments}.items():
            whole = value.read(name, [slice(0, size) for size in shape]).clone()
            torch.save(
                whole.flatten() if saved.stage == 3 else {"cat_dim": 0, "param": whole}, of_parameter / f"{key}.pt"
            )
        if saved.stage != 3:
            torch.save(others[name]["step"], of_parameter / "step.pt")
    common = {"zero_stage": saved.stage, "dynamic_loss_scale": False, "param_groups": saved.optimizer["param_groups"]}
    common["optimizer_state_dict"] = {"state": {0: {"step": next(iter(others.values()))["step"]}}}
    torch.save(common, where / "zero" / "optimizer_state.pt")
    (where.parent / "latest_universal").write_text(where.name)


@pytest.mark.parametrize("name", ["stage1_fp32", "stage3_fp32"])
def test_a_universal_checkpoint_goes_on(folders, tmp_path, name):
    _universal(tmp_path / "global_step4_universal", folders / name / "global_step4")
    for losses, client, counters in run_ranks(
        _engine_goes_on, world=2, args=(str(tmp_path), 2, "global_step4_universal")
    ):
        assert losses == pytest.approx(_LOSSES[name][record.STEPS :], abs=1e-6)
        assert client == {"epoch": 3, "note": "kept"}
        assert counters == (8, 64, 0)


def test_a_universal_checkpoint_that_lacks_a_part_is_named(folders, tmp_path):
    where = tmp_path / "global_step4_universal"
    _universal(where, folders / "stage1_fp32" / "global_step4")
    assert open_folder(str(where)).client_state == {"epoch": 3, "note": "kept"}
    parameter = next(iter(open_folder(str(where)).trained))
    for lost in ("zero/optimizer_state.pt", f"zero/{parameter}/fp32.pt"):
        kept = (where / lost).read_bytes()
        (where / lost).unlink()
        with pytest.raises(CheckpointError) as error:
            open_folder(str(where))
        assert error.value.code == "checkpoint-damaged"
        (where / lost).write_bytes(kept)


def failing(*_: object) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("name", ["stage2_fp32", "stage3_fp32"])
def test_a_conversion_of_ours_goes_on(folders, tmp_path, name):
    converted = tmp_path / "global_step4_universal"
    convert(str(folders / name / "global_step4"), str(converted))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="checkpoint-io"):
        patch.setattr(os, "rename", failing)
        convert(str(folders / name / "global_step4"), str(converted))
    assert sorted(os.listdir(tmp_path)) == [converted.name, "latest_universal"], "the older conversion stays"
    assert (tmp_path / "latest_universal").read_text() == "global_step4_universal"
    for losses, client, counters in run_ranks(
        _engine_goes_on, world=2, args=(str(tmp_path), 1, "global_step4_universal")
    ):
        assert losses == pytest.approx(_LOSSES[name][record.STEPS :], abs=1e-6)
        assert client == {"epoch": 3, "note": "kept"}
        assert counters == (8, 64, 0)


def _engine_saves(folder: str, fp16: bool) -> list[float]:
    """Four steps of the recorded script, on our engine at stage 2; a checkpoint; and the losses of the next four."""
    torch.manual_seed(1)
    model = record.Net()
    told = record.config(2, "fp32")
    stepped = {"optimizer": torch.optim.AdamW(record.groups(model), lr=0.5)}
    if fp16:
        told["fp16"] = {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 3, "min_loss_scale": 2}
        told["optimizer"] = {"type": "AdamW", "params": {"lr": 0.5}}
        stepped = {"model_parameters": record.groups(model)}
    engine = initialize(model=model, config=told, **stepped)[0]
    losses = []
    for step in range(2 * record.STEPS):
        if step == record.STEPS:
            engine.save_checkpoint(folder, client_state={"epoch": 3, "note": "kept"})
        rows = record.batch(step).chunk(2)[dist.get_rank()]
        loss = engine(rows.to(engine.module.inner.weight.dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.accelerator.reduce(loss.detach(), "mean")))
    return losses[record.STEPS :]


def test_a_checkpoint_of_ours_is_written_as_a_universal_one(tmp_path):
    expected = run_ranks(_engine_saves, world=2, args=(str(tmp_path), False))[0]
    where = tmp_path / "global_step4_universal"
    synced: set[int] = set()
    fsync = os.fsync

    def noted(number: int) -> None:
        synced.add(os.fstat(number).st_ino)
        fsync(number)

    # The second conversion replaces the first.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        for _ in range(2):
            main(parse_arguments(["--input_folder", str(tmp_path / "global_step4"), "--output_folder", str(where)]))
    assert {path.stat().st_ino for path in where.rglob("*") if path.is_file()} <= synced, "files outlive a crash"
    # What DeepSpeed's loaders of stages 1 to 3 take from it.
    model = torch.load(where / "mp_rank_00_model_states.pt", weights_only=True)
    assert {key: model[key] for key in ("global_steps", "global_samples", "skipped_steps", "mp_world_size")} == {
        "global_steps": 4, "global_samples": 32, "skipped_steps": 0, "mp_world_size": 1,
    }  # fmt: skip
    assert model["lr_scheduler"] == {"last_batch_iteration": 3} and model["note"] == "kept"
    assert model["buffer_names"] == ["calls"] and list(model["frozen_param_shapes"]) == ["frozen.weight"]
    assert (where / "zero_pp_rank_0_mp_rank_00_model_states.pt").is_file()
    common = torch.load(where / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["weight_decay"] for group in common["param_groups"]] == [0.1, 0.0]
    assert common["optimizer_state_dict"]["state"][0]["step"] == 4 and common["ds_version"] == "0.19.8"
    for group in model["param_shapes"]:
        for name, shape in group.items():
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                saved = torch.load(where / "zero" / name / f"{key}.pt", weights_only=True)
                assert saved["param"].shape == shape and saved["param"].dtype == torch.float32
            assert torch.load(where / "zero" / name / "step.pt", weights_only=True) == 4
    (tmp_path / "latest").unlink()
    for losses, client, counters in run_ranks(
        _engine_goes_on, world=1, args=(str(tmp_path), 3, "global_step4_universal")
    ):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert client == {"epoch": 3, "note": "kept"} and counters == (8, 64, 0)


def test_the_loss_scale_goes_both_ways(tmp_path):
    run_ranks(_engine_saves, world=2, args=(str(tmp_path), True))
    convert(str(tmp_path / "global_step4"), str(tmp_path / "universal"))
    state = json.loads((tmp_path / "global_step4" / "state.json").read_text())["scaler"]
    theirs = open_folder(str(tmp_path / "universal")).dynamic_scale
    assert theirs["cur_scale"] == 64.0 and theirs["min_scale"] == 2 and theirs["scale_window"] == 3
    # DeepSpeed grows where the steps since the last overflow are a multiple of the window.
    assert (theirs["cur_iter"] - theirs["last_overflow_iter"] - 1) % 3 == 1
    assert _scaler_state(theirs) == {key: state[key] for key in ("scale", "_growth_tracker", "_hysteresis")}
    # DeepSpeed's own Adam, which this config asks for, counts in numbers.
    assert type(torch.load(tmp_path / "universal" / "zero" / "inner.bias" / "step.pt", weights_only=True)) is int
    with zipfile.ZipFile(tmp_path / "universal" / "zero" / "optimizer_state.pt") as archive:
        written = archive.read("archive/data.pkl")
    assert b"deepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n" in written
    assert not any(name.startswith("deepspeed.runtime") for name in sys.modules)


@pytest.mark.parametrize(
    ("good", "window", "tracker"),
    [(0, 3, -1), (1, 3, 0), (3, 3, 2), (4, 3, 0), (6, 3, 2), (7, 3, 0), (1000, 1000, 999)],
)
def test_the_good_steps_of_a_loss_scale_are_counted(good, window, tracker):
    theirs = {"cur_scale": 8.0, "cur_iter": good + 5, "last_overflow_iter": 4, "scale_window": window}
    assert _scaler_state(theirs) == {"scale": 8.0, "_growth_tracker": tracker}


@pytest.mark.parametrize(
    ("source", "output", "code"),
    [
        ("stage0_fp32/global_step4", "new", "checkpoint-foreign"),
        ("stage1_fp32", "new", "checkpoint-missing"),
        ("stage1_fp32/global_step4", "stage2_fp32", "checkpoint-foreign"),
    ],
)
def test_what_is_not_converted(folders, source, output, code):
    with pytest.raises(CheckpointError) as error:
        convert(str(folders / source), str(folders / output))
    assert error.value.code == code
    assert not (folders / "new").exists() and (folders / "stage2_fp32" / "global_step4").is_dir()


def test_stage_3_loads_divided_as_it_was_and_otherwise(folders):
    folder = str(folders / "stage3_fp32" / "global_step4")
    for plan in ({"shard": 2, "zero": 3}, {"shard": 2, "zero": 1}, {"replicate": 2}):
        (losses, _, _), _ = run_ranks(_go_on, world=2, args=(folder, plan, "fp32"))
        assert losses == pytest.approx(_LOSSES["stage3_fp32"][record.STEPS :], abs=1e-6)


def test_weights_alone_are_exported_whole_from_every_stage(folders, tmp_path):
    found = {}
    for name in _NAMES:
        export_checkpoint(folders / name, tmp_path / name)  # the folder with the file `latest`
        found[name] = load_file(tmp_path / name / "model.safetensors")
        model = record.Net()
        load_model(model, tmp_path / name)
        torch.testing.assert_close(model.out.weight, found[name]["back.weight"], check_dtype=False)
        assert model.out.weight is model.back.weight
    for stage in (1, 2, 3):
        for key, value in found["stage0_fp32"].items():
            if key != "out.weight":
                torch.testing.assert_close(found[f"stage{stage}_fp32"][key], value, msg=key)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_weights_are_copies_in_float32(folders, precision):
    """Of a bf16 run they are what the optimizer keeps, and not the model's rounded parameters."""
    states = [get_fp32_state_dict_from_zero_checkpoint(folders / f"stage{stage}_{precision}") for stage in (1, 2, 3)]
    record.Net().load_state_dict(states[0])  # with the tied weight under both of its names
    for name, value in states[0].items():
        assert value.dtype == torch.float32 and value.untyped_storage().nbytes() == value.nbytes, name
        torch.testing.assert_close(states[1][name], value)
        torch.testing.assert_close(states[2][name], value)
    folder = folders / f"stage3_{precision}"
    trained = get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    assert trained.keys() == states[2].keys() - {"frozen.weight"}
    assert not torch.equal(states[0]["inner.weight"], states[0]["inner.weight"].bfloat16().float())


def test_whole_weights_of_our_checkpoint_have_a_tied_weight_under_both_names(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(record.Net())
    accelerator.save_state(tmp_path / "saved")
    state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved")
    assert state["out.weight"] is state["back.weight"]
    record.Net().load_state_dict(state)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "whole")
    record.Net().load_state_dict(torch.load(tmp_path / "whole" / "pytorch_model.bin"))


def test_a_folder_that_lacks_a_rank_is_named(folders, tmp_path):
    shutil.copytree(folders / "stage2_fp32" / "global_step4", tmp_path / "cut")
    os.remove(tmp_path / "cut" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match=r"lacks the files of rank 1\.") as caught:
        DeepSpeedFolder(str(tmp_path / "cut"))
    assert caught.value.code == "checkpoint-damaged"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_of_stage_3_that_lacks_a_model_file_is_named(folders, tmp_path, rank):
    shutil.copytree(folders / "stage3_fp32" / "global_step4", tmp_path / "cut")
    # Each model file has that rank's part of the frozen parameters.
    assert DeepSpeedFolder(str(tmp_path / "cut")).first["frozen_param_shapes"]
    os.remove(tmp_path / "cut" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=rf"lacks the files of rank {rank}\.") as caught:
        DeepSpeedFolder(str(tmp_path / "cut"))
    assert caught.value.code == "checkpoint-damaged"


def test_parts_of_tensor_parallelism_are_refused(folders, tmp_path):
    shutil.copytree(folders / "stage0_fp32" / "global_step4", tmp_path / "tp")
    shutil.copy(tmp_path / "tp" / "mp_rank_00_model_states.pt", tmp_path / "tp" / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor parallelism") as caught:
        DeepSpeedFolder(str(tmp_path / "tp"))
    assert caught.value.code == "checkpoint-foreign"


class _Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_nothing_in_a_folder_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("evil")
    torch.save({"module": {}, "client": _Runs()}, "evil/mp_rank_00_model_states.pt", pickle_module=pickle)
    with pytest.raises(CheckpointError) as caught:
        DeepSpeedFolder("evil")
    assert caught.value.code == "checkpoint-unsafe"
    assert not os.path.exists("ran")
