"""Bad input for big models: coded errors that scripts catch by the classes which they know; and hooks that travel."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from inference_models import IDS, Model, made
from safetensors.torch import save_file
from torch import nn

import paceline_accelerate
from paceline import CheckpointError, ConfigError, PlanError
from paceline.base import env
from paceline.checkpoint import save_model
from paceline_accelerate import hooks, offload
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.big_modeling import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from paceline_accelerate.device_map import check_alone, check_device_map, infer_auto_device_map
from paceline_accelerate.loading import load_checkpoint_in_model
from paceline_accelerate.module_sizes import get_balanced_memory, get_max_memory
from paceline_accelerate.module_tensors import id_tensor_storage, set_module_tensor_to_device
from paceline_accelerate.offloaded_state import align_module_device, get_state_dict_offloaded_model
from paceline_accelerate.state import AcceleratorState
from paceline_large import inference
from paceline_large.inference import memory


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def test_a_map_that_leaves_modules_out_says_which_and_how_many_bytes() -> None:
    with pytest.raises(
        ValueError,
        match=r"(?s)any device for the following parameters: 2.weight, 2.bias.*16 bytes.*add to it: '2': 'cpu'",
    ) as error:
        check_device_map(network(), {"0": "cpu"})
    assert isinstance(error.value, PlanError) and error.value.code == "device-map-incomplete"


def test_words_for_maps_devices_and_sizes() -> None:
    with pytest.raises(ValueError, match=r"device_map='best'.*\[device-map-name\]"):
        load_checkpoint_and_dispatch(network(), "nowhere", device_map="best")
    with pytest.raises(ConfigError, match=r"\[device-name\]"):
        get_max_memory({"gpu": 1})
    with pytest.raises(ValueError, match=r"(?s)'lots' is not in a valid format.*\[size-text\].*10GB"):
        get_max_memory({"cpu": "lots"})


def test_free_memory_of_the_host_is_that_of_the_engine_which_sees_a_containers_limit(monkeypatch) -> None:
    monkeypatch.setattr(memory, "_free_on_host", lambda group: 1234)
    assert get_max_memory()["cpu"] == 1234


def test_a_model_that_another_thread_builds_has_weights() -> None:
    with init_empty_weights(), ThreadPoolExecutor(1) as threads:
        other = threads.submit(network).result()
        assert not other[0].weight.is_meta and network()[0].weight.is_meta


def test_limits_for_generation_may_leave_accelerator_0_out() -> None:
    limits: dict[int | str, int | str] = {1: 900, 2: 900}
    assert get_balanced_memory(network(), limits, low_zero=True) == get_balanced_memory(network(), limits)


def test_modules_for_the_disk_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)'2'.*\[offload-folder\].*16 bytes.*offload_dir"):
        dispatch_model(network(), {"0": "cpu", "2": "disk"})
    with pytest.raises(PlanError, match=r"(?s)\[offload-folder\].*'', which has 52 bytes"):
        load_checkpoint_in_model(network(), tmp_path, {"": "disk"})


def test_a_map_is_checked_before_the_weights_are_read() -> None:
    with pytest.warns(UserWarning, match="'tow'"), pytest.raises(PlanError, match=r"\[device-map-incomplete\]"):
        load_checkpoint_and_dispatch(network(), "nowhere", device_map={"0": "cpu", "tow": "cpu"})


@pytest.mark.parametrize("has_links", [True, False])
def test_a_tied_weight_that_the_checkpoint_has_once_is_on_the_disk_under_both_names(
    tmp_path: Path, monkeypatch, has_links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    save_file({"0.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    load_checkpoint_and_dispatch(
        model, tmp_path / "model.safetensors", device_map={"": "disk"}, offload_folder=tmp_path / "off"
    )
    assert model(torch.ones(1, 2)).tolist() == [[4.0, 4.0]] and model[1].weight.is_meta


def test_an_index_that_names_a_missing_or_damaged_file(tmp_path: Path) -> None:
    table = {"weight_map": {"0.weight": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    with pytest.raises(FileNotFoundError, match=r"a.safetensors.*\[checkpoint-missing\]"):
        load_checkpoint_in_model(network(), tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{nonsense")
    with pytest.raises(CheckpointError, match=r"\[checkpoint-damaged\]"):
        load_checkpoint_in_model(network(), tmp_path)
    # No header at all: these bytes are no pickle that asks for code, which the user could be told to trust.
    (tmp_path / "a.safetensors").write_bytes(b"X" * 60)
    with pytest.raises(CheckpointError, match=r"\[checkpoint-damaged\]"):
        load_checkpoint_in_model(network(), tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)\[checkpoint-damaged\].*it is empty"):
        load_checkpoint_in_model(network(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"\[checkpoint-damaged\]"):
        load_checkpoint_in_model(network(), tmp_path)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ValueError, match=r"\[checkpoint-path\]"):
            load_checkpoint_in_model(network(), path)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize("on_meta", [True, False])
def test_weights_in_memory_do_not_change_with_the_file_that_they_were_read_from(
    tmp_path: Path, ending: str, device_map, on_meta: bool
) -> None:
    path = tmp_path / f"model.{ending}"
    saved = dict(nn.Linear(512, 512).state_dict())
    if ending == "bin":
        torch.save(saved, path)
    else:
        save_file(saved, path)
    with torch.device("meta" if on_meta else "cpu"):
        model = nn.Linear(512, 512)
    load_checkpoint_in_model(model, path, device_map)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(bytes(size))
    assert torch.equal(model.weight, saved["weight"])


def test_a_file_of_a_training_state_holds_weights_too(tmp_path: Path) -> None:
    model = network()
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "state.bin")
    other = network()
    load_checkpoint_in_model(other, tmp_path / "state.bin", {"": "cpu"}, strict=True)
    assert torch.equal(other[0].weight, model[0].weight)


def test_what_was_written_before_a_damaged_file_is_removed(tmp_path: Path) -> None:
    table = {"weight_map": {"0.weight": "a.safetensors", "0.bias": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(table))
    save_file({"0.weight": torch.ones(3, 2)}, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"X" * 60)
    with pytest.raises(CheckpointError, match=r"\[checkpoint-damaged\]"):
        load_checkpoint_in_model(network(), tmp_path, {"": "disk"}, tmp_path / "offload")
    assert not list((tmp_path / "offload").iterdir())


def test_strict_finds_missing_names_but_not_tied_ones(tmp_path: Path) -> None:
    model = network()
    torch.save({"0.weight": model[0].weight}, tmp_path / "part.bin")
    with pytest.raises(RuntimeError, match=r"(?s)\[checkpoint-names\].*0\.bias"):
        load_checkpoint_in_model(model, tmp_path / "part.bin", strict=True)
    with pytest.raises(ValueError, match="checkpoint-names"):
        load_checkpoint_in_model(model, tmp_path / "part.bin", {"": "cpu"}, strict=True)
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    state = {name: value for name, value in tied.state_dict().items() if name != "1.weight"}
    torch.save(state, tmp_path / "tied.bin")
    load_checkpoint_in_model(tied, tmp_path / "tied.bin", {"": "cpu"}, strict=True)
    assert tied[1].weight is tied[0].weight


def test_without_a_map_the_offload_folder_is_not_used(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    torch.save(tied.state_dict(), tmp_path / "tied.bin")
    load_checkpoint_in_model(tied, tmp_path / "tied.bin", None, tmp_path / "offloaded")
    assert tied[1].weight is tied[0].weight
    assert not (tmp_path / "offloaded").exists()


def test_a_folder_that_cannot_be_written_to_or_is_full(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"\[checkpoint-"):
        disk_offload(network(), tmp_path / "file" / "offload")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    offload.offload_weight(torch.ones(2), "other", tmp_path)
    save_file(dict(network().state_dict()), tmp_path / "model.safetensors")

    def full_after_two(path: str, *arguments: object, **options: object) -> object:
        if len(list((tmp_path / "loaded").iterdir())) == 2:
            full()
        return open(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(offload, "open", full_after_two, raising=False)
        with pytest.raises(CheckpointError, match="checkpoint-disk-full"):
            load_checkpoint_in_model(network(), tmp_path / "model.safetensors", {"": "disk"}, tmp_path / "loaded")
    assert not list((tmp_path / "loaded").iterdir())
    monkeypatch.setattr(offload, "open", full, raising=False)
    with pytest.raises(CheckpointError, match=r"(?s)0\.weight \(24 bytes\).*\[checkpoint-disk-full\].*max_memory="):
        disk_offload(network(), tmp_path / "offload")
    assert not list((tmp_path / "offload").iterdir()), "what was written is of no use, and takes room"
    assert (tmp_path / "other.dat").exists()


def test_an_offloaded_file_that_was_cut_short(tmp_path: Path) -> None:
    model = disk_offload(network(), tmp_path)
    (tmp_path / "2.weight.dat").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=r"4 bytes and not 12.*\[checkpoint-damaged\]"):
        model(torch.ones(1, 2))


def test_float8_weights_and_empty_ones_are_offloaded_exactly(tmp_path: Path) -> None:
    tensors = {
        "small": torch.ones(3).to(torch.float8_e4m3fn), "empty": torch.empty(0, 4), "none": torch.tensor(2.5),
    }  # fmt: skip
    offload.offload_state_dict(tmp_path, tensors)
    loader = offload.OffloadedWeightsLoader(save_folder=tmp_path)
    for name, tensor in tensors.items():
        assert loader[name].dtype == tensor.dtype and torch.equal(loader[name].float(), tensor.float())


def test_weights_of_files_are_mapped_and_changes_last_for_one_forward(tmp_path: Path) -> None:
    offload.offload_state_dict(tmp_path, {"a": torch.zeros(2), "b": torch.ones(2)})
    weights = offload.OffloadedWeightsLoader(save_folder=tmp_path)
    first = weights["a"]
    assert weights["a"] is first, "read once"
    with torch.inference_mode():
        weights["b"].add_(1)
    first.add_(1)
    assert torch.equal(weights["a"], torch.zeros(2)) and torch.equal(weights["b"], torch.ones(2))
    held = weights["b"]
    offload.offload_weight(torch.full((2,), 5.0), "b", tmp_path)
    assert torch.equal(weights["b"], torch.full((2,), 5.0)), "the file was written again"
    assert torch.equal(held, torch.ones(2)), "and the old one can still be looked at"
    copied = pickle.loads(pickle.dumps(weights))
    assert torch.equal(copied["b"], weights["b"]) and copied["b"].data_ptr() != weights["b"].data_ptr()
    (tmp_path / "a.dat").unlink()
    with pytest.raises(FileNotFoundError, match=r"\[checkpoint-missing\]"):
        weights["a"]


def test_weights_of_safetensors_files_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2), "scale": torch.tensor(3.0)}, path)
    index = {
        "x": {"safetensors_file": str(path)},
        "half": {"safetensors_file": str(path), "weight_name": "x", "dtype": "float16"},
        "scale": {"safetensors_file": str(path)},
    }
    weights = offload.OffloadedWeightsLoader(index=index)
    assert weights["x"] is weights["x"] and weights["scale"].item() == 3
    assert weights["half"].dtype == torch.float16
    weights["x"].zero_()
    assert torch.equal(weights["x"], torch.ones(2))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"\[checkpoint-missing\]"):
        weights["x"]


def test_what_stands_on_meta_between_forwards_stays_the_same(tmp_path: Path) -> None:
    model = network()
    x = torch.ones(1, 2)
    expected = model(x)
    disk_offload(model, tmp_path, "cpu")
    before = dict(model.named_parameters())
    brought = []
    model[0].register_forward_pre_hook(lambda module, args: brought.append(module.weight))
    model[0].register_forward_hook(lambda module, args, output: brought.append(module.weight))
    output = model(x)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(weight.is_meta for weight in brought), "hooks of the module run outside of its forward"


def test_weights_of_another_dtype_are_cast_for_the_forward() -> None:
    model = network()
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    expected = model(torch.ones(1, 2))
    cpu_offload(model, "cpu", state_dict=state)
    assert torch.equal(model(torch.ones(1, 2)), expected)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_all_of_a_model_on_the_disk(tmp_path: Path) -> None:
    model = network()
    expected = model(torch.ones(1, 2))
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(torch.ones(1, 2)), expected)


def test_a_hooked_model_is_pickled_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cpu_offload(network())
    expected = model(torch.ones(1, 2))
    # Where accelerate's names were served in this process, the classes say that they come from there. Pickle imports the
    # package, too.
    module = hooks.AlignDevicesHook.__module__
    monkeypatch.setitem(sys.modules, module.partition(".")[0], paceline_accelerate)
    monkeypatch.setitem(sys.modules, module, hooks)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(torch.ones(1, 2)), expected)
        assert other.forward.args[0] is other


def test_tied_weights_come_to_a_device_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    seen = []
    model[0].register_forward_hook(lambda module, *_: seen.append(module.weight))
    model = dispatch_model(model, {"0": "cpu", "1": "cpu"}, main_device="meta", force_hooks=True)
    model._hf_hook.io_same_device = False
    model(torch.ones(1, 2))
    assert seen[0].is_meta


def test_a_tied_buffer_stays_a_buffer() -> None:
    """accelerate puts it among the parameters."""
    value = torch.ones(2)
    shared = {value.data_ptr(): {}}
    for _ in range(2):
        norm = nn.BatchNorm1d(2)
        set_module_tensor_to_device(norm, "running_mean", "cpu", value=value, tied_params_map=shared)
        assert "running_mean" in norm._buffers and "running_mean" not in norm._parameters


@pytest.mark.parametrize("limit", [7000, 10_000, 30_000])
def test_a_device_map_is_a_placement_of_the_engine(tmp_path: Path, limit: int) -> None:
    plain = made()
    save_model(plain, tmp_path)
    with init_empty_weights():
        empty = Model()
    device_map = infer_auto_device_map(empty, {"cpu": limit}, no_split_module_classes=["Block"])
    model = inference.load(Model, tmp_path, placement=device_map)
    with torch.no_grad():
        assert torch.equal(model(IDS), plain(IDS))
    model.placed.remove()
    homes = {placed.block.name: placed.home for placed in model.placed.placement.blocks}
    assert set(homes.values()) == {"cpu", "disk"} if limit < 30_000 else {"cpu"}
    assert homes["(model)"] == "cpu", "what a model itself holds is used in many calls, and not offloaded"


def test_buffers_of_divided_modules_are_in_the_map() -> None:
    """accelerate forgets them, and then refuses its own map."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4))

    with init_empty_weights():
        model = nn.Sequential(Block(), Block())
    device_map = infer_auto_device_map(model, {"cpu": 200})
    check_device_map(model, device_map)


def test_weights_that_are_nowhere() -> None:
    with init_empty_weights():
        model = network()
    with pytest.raises(ValueError, match=r"0\.weight"):
        get_state_dict_offloaded_model(model)


def test_parameters_come_back_from_meta() -> None:
    model = network()
    before = model[0].weight
    with align_module_device(model[0], "meta"):
        assert model[0].weight.is_meta
    assert model[0].weight is before


def test_a_spread_model_is_prepared_by_one_process_alone(tmp_path: Path) -> None:
    with env.patched({"ACCELERATE_BYPASS_DEVICE_MAP": "false"}):
        check_alone(1)
        with pytest.raises(ValueError, match=r"(?s)\[device-map-ranks\].*2 processes.*--num_processes 1"):
            check_alone(2)
    with env.patched({"ACCELERATE_BYPASS_DEVICE_MAP": "true"}):
        check_alone(2)
    model = dispatch_model(network(), {"0": "cpu", "2": "disk"}, offload_dir=tmp_path)
    accelerator = Accelerator(cpu=True)
    inside = nn.Sequential(model)
    assert accelerator.verify_device_map(inside) and not accelerator.verify_device_map(network())
    prepared = accelerator.prepare(model)
    assert prepared[2].weight.is_meta and prepared(torch.ones(1, 2)).shape == (1, 1)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("safe", [True, False])
def test_an_offloaded_model_is_saved_whole_and_in_several_files(tmp_path: Path, safe: bool) -> None:
    model = network()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    dispatch_model(model, {"0": "cpu", "2": "disk"}, offload_dir=tmp_path / "offload")
    Accelerator(cpu=True).save_model(model, tmp_path / "saved", max_shard_size=30, safe_serialization=safe)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert len(os.listdir(tmp_path / "saved")) == 3
    other = network()
    load_checkpoint_in_model(other, tmp_path / "saved", {"": "cpu"}, strict=True)
    assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())


def test_errors_travel_between_processes() -> None:
    for error in (offload.missing_file("x", "why"), _error_of(lambda: load_checkpoint_in_model(network(), "nowhere"))):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def _error_of(function) -> Exception:
    try:
        function()
    except CheckpointError as error:
        return error
    raise AssertionError("no error")


def test_a_sparse_tensor_has_no_storage_of_its_own() -> None:
    assert id_tensor_storage(torch.eye(2).to_sparse()) == (torch.device("cpu"), 0, 16)
