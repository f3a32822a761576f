"""Scripts as accelerate's documentation teaches them get the answers that accelerate 1.15.0 gave."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision

from paceline.testing import run_ranks
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.big_modeling import disk_offload
from paceline_accelerate.deepspeed_plugin import DeepSpeedPlugin
from paceline_accelerate.device_map import infer_auto_device_map
from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin
from paceline_accelerate.loading import load_checkpoint_in_model, load_state_dict
from paceline_accelerate.local_sgd import LocalSGD
from paceline_accelerate.parallelism_config import DeepSpeedSequenceParallelConfig, TorchTensorParallelConfig
from paceline_accelerate.plugins import TorchDynamoPlugin
from paceline_accelerate.state import AcceleratorState
from paceline_accelerate.tracking import GeneralTracker, filter_trackers

pytestmark = pytest.mark.usefixtures("fresh_states")


# -- checkpoints ---------------------------------------------------------------------------------------------


def test_each_save_is_counted_without_automatic_names_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.save_iteration == 0
    accelerator.save_state(tmp_path / "a")
    accelerator.save_state(tmp_path / "b")
    assert accelerator.save_iteration == 2
    accelerator.load_state(tmp_path / "a")
    assert accelerator.save_iteration == 2


def test_a_checkpoint_without_the_prepared_models_misses_a_file(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(FileNotFoundError, match="models: 1 here, 0 in the folder"):
        accelerator.load_state(tmp_path)


def test_models_for_evaluation_are_in_a_checkpoint_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    reference = accelerator.prepare_model(nn.Linear(2, 1), evaluation_mode=True)
    model = accelerator.prepare(nn.Linear(3, 1))
    teacher = accelerator.prepare_model(nn.Linear(4, 1), evaluation_mode=True)
    assert accelerator._models == [reference, model, teacher]
    accelerator.save_state(tmp_path, safe_serialization=True)
    widths = []
    for name in ("model", "model_1", "model_2"):
        widths.append(load_state_dict(tmp_path / f"{name}.safetensors")["weight"].shape[1])
    assert widths == [2, 3, 4]
    saved = teacher.weight.detach().clone()
    nn.init.zeros_(teacher.weight)
    accelerator.load_state(tmp_path)
    assert torch.equal(teacher.weight, saved)
    accelerator.free_memory()
    assert accelerator._models == []


def test_an_optimizer_shows_its_groups() -> None:
    optimizer = Accelerator(cpu=True).prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))
    assert repr(optimizer).startswith("AcceleratedOptimizer (\nParameter Group 0\n")


# -- big models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"format": "np"}, OSError, "does not contain the valid metadata"),
        ({"by": "somebody"}, OSError, "does not contain the valid metadata"),
        ({"format": "tf"}, ValueError, "was saved with tf"),
    ],
)
def test_weights_of_another_format_are_refused(
    metadata: dict[str, str], error: type, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(1, 1)}, path, metadata=metadata)
    for device_map in (None, {"": "cpu"}):
        with pytest.raises(error, match=message):
            load_state_dict(path, device_map)
    with pytest.raises(error, match=message):
        load_checkpoint_in_model(nn.Linear(1, 1, bias=False), str(path))


def test_weights_without_metadata_are_read(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    assert load_state_dict(tmp_path / "model.safetensors")["weight"].item() == 1


def offload_again_and_again(folder: str) -> bool:
    """Offloads a model to a folder that the other rank uses too, many times."""
    for _ in range(40):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        disk_offload(model, folder, torch.device("cpu"))
        model(torch.ones(1, 8))
    return True


def test_ranks_may_offload_to_one_folder(tmp_path: Path) -> None:
    assert run_ranks(offload_again_and_again, 2, args=(str(tmp_path),)) == [True, True]
    names = [path.name for path in tmp_path.iterdir()]
    assert sorted(names) == ["0.bias.dat", "0.weight.dat", "1.bias.dat", "1.weight.dat", "index.json"]


class Buffered(nn.Module):
    """A layer with a buffer of its own."""

    def __init__(self, width: int, buffer: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("buffer", torch.zeros(buffer))


def test_a_warning_of_buffers_that_have_no_room_beside_the_largest_layer() -> None:
    def place(memory: int, *, whole: bool = True, fallback: bool = False) -> None:
        classes = ["Buffered"] if whole else None
        infer_auto_device_map(model, {0: memory, "cpu": 10_000}, classes, fallback_allocation=fallback)

    model = nn.Sequential(Buffered(10, 100), Buffered(20, 50), Buffered(5, 7))
    # The buffers have 628 bytes, and the largest layer 1880; accelerate warns if their sum does not fit.
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        place(2500)
    place(2520)
    with pytest.warns(UserWarning, match="628 bytes of buffers"):
        place(600, whole=False)
    with pytest.warns(UserWarning, match="600 bytes of buffers"):
        place(2520, fallback=True)
    model = nn.Sequential(Buffered(30, 0), Buffered(5, 200), Buffered(4, 3))
    with pytest.warns(UserWarning, match="812 bytes of buffers"):
        place(1700, fallback=True)
    place(1800, fallback=True)


def quantised_places() -> list[str]:
    """Prepares quantised models on several places; returns the names of the errors."""
    accelerator = Accelerator(cpu=True)
    answers = []
    for place in ("cpu", torch.device("cpu"), 1, 0, "disk", None):
        model = nn.Sequential(nn.Linear(1, 1))
        model.is_loaded_in_4bit = True
        if place is not None:
            model.hf_device_map = {"": place}
        try:
            accelerator.prepare_model(model, evaluation_mode=True)
            answers.append("prepared")
        except ValueError as error:
            assert "You can't train a model that has been loaded in 8-bit or 4-bit precision" in str(error)
            answers.append("ValueError")
        except RuntimeError:
            answers.append("RuntimeError")
    return answers


def test_a_quantised_model_is_on_the_device_of_its_process() -> None:
    # So accelerate answers on the first of two processes on the CPU, where its device is "cpu:0".
    expected = ["ValueError", "ValueError", "ValueError", "prepared", "RuntimeError", "prepared"]
    assert run_ranks(quantised_places, 2)[0] == expected
    assert run_ranks(quantised_places, 1, group=False)[0] == ["prepared"] * 6


# -- local SGD -----------------------------------------------------------------------------------------------


def local_steps() -> list[bool]:
    """Trains with windows of two micro-batches; returns after each whether the ranks have the same weight."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    equal = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for number in range(4):
            with accelerator.accumulate(model):
                row = torch.full((1, 1), 1.0 + number + accelerator.process_index)
                accelerator.backward(model(row).mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
            equal.append(bool((weights == weights[0]).all()))
    assert local.num_steps == 4
    return equal


def test_local_sgd_counts_micro_batches() -> None:
    # The average after the second micro-batch comes with the first optimizer step, and so on.
    assert run_ranks(local_steps, 2) == [[True] * 4] * 2


# -- trackers ------------------------------------------------------------------------------------------------


def test_what_a_tracker_class_has_to_define() -> None:
    class Incomplete(GeneralTracker):
        name, tracker = "incomplete", None

    with pytest.raises(NotImplementedError, match="required attributes `requires_logging_directory`"):
        Incomplete()


def test_words_of_refused_trackers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Unsupported logging capability: bogus\. Choose between \['all', 'aim'"):
        Accelerator(cpu=True, log_with="bogus")
    with pytest.raises(ValueError, match="Logging with `tensorboard` requires a `logging_dir`"):
        filter_trackers(["tensorboard"])
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    with pytest.raises(ValueError, match="wandb is not an available tracker"):
        accelerator.get_tracker("wandb")
    tracker = accelerator.get_tracker("tensorboard")
    assert tracker.writer is tracker.tracker and repr(accelerator.trackers) == repr([tracker])
    accelerator.end_training()
    assert os.listdir(tmp_path) == ["run"]


# -- plugins -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reshard_after_forward": True}, "not supported with FSDP1"),
        ({"fsdp_version": 2, "sharding_strategy": "FULL_SHARD"}, "not supported with FSDP2"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "FSDP2 does not support LOCAL_STATE_DICT"),
        ({"activation_checkpointing_offload": True}, "requires `activation_checkpointing=True`"),
        ({"cpu_offload": "x"}, "`cpu_offload` must be an instance of `torch.distributed.fsdp.CPUOffload` in FSDP1"),
        (
            {"fsdp_version": 2, "cpu_offload": CPUOffload()},
            "must be an instance of `torch.distributed.fsdp.OffloadPolicy`",
        ),
        (
            {"fsdp_version": 2, "mixed_precision_policy": MixedPrecision()},
            "`mixed_precision_policy` must be an instance of",
        ),
    ],
)
def test_words_of_refused_fields_of_fsdp(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FullyShardedDataParallelPlugin(**fields)


def test_efficient_loading_needs_synchronized_weights() -> None:
    with pytest.warns(UserWarning, match="sync_module_states cannot be False"):
        plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, sync_module_states=False)
    assert plugin.sync_module_states


def test_a_fixed_sequence_length_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_SP_SEQ_LENGTH"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "128")
    assert DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False).sp_seq_length == 128
    assert DeepSpeedSequenceParallelConfig().sp_seq_length is None


def test_a_warning_of_asynchronous_tensor_parallel() -> None:
    with pytest.warns(UserWarning, match="Async tensor parallelism"):
        TorchTensorParallelConfig(enable_async_tp=True)


def test_a_missing_file_of_weights_is_a_file_that_was_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_state_dict(tmp_path / "missing.safetensors")


@pytest.mark.needs("deepspeed")
def test_words_of_refused_deepspeed_configs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="string path to an existing deepspeed config"):
        DeepSpeedPlugin(hf_ds_config=str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match="ZeRO optimization config"):
        DeepSpeedPlugin(hf_ds_config={})
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "bf16": {"enabled": True}, "steps": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    with pytest.raises(ValueError, match="`steps` is auto in the DeepSpeed config, and not found in kwargs"):
        plugin.fill_match("steps")
    with pytest.raises(ValueError, match="DeepSpeed config values mismatch kwargs values"):
        plugin.deepspeed_config_process(steps=1, gradient_clipping=2.0)
    with pytest.raises(ValueError, match="cannot be set to `fp16` when `bf16` is set in the DeepSpeed config"):
        plugin.set_mixed_precision("fp16")


def test_the_state_shows_how_models_are_compiled() -> None:
    assert Accelerator(cpu=True, dynamo_backend="eager").state.dynamo_plugin.backend == "EAGER"
    plugin = TorchDynamoPlugin(backend="eager", disable=True)
    assert Accelerator(cpu=True, dynamo_plugin=plugin).state.dynamo_plugin is plugin


def test_words_of_a_compile_backend_that_is_given_twice() -> None:
    with pytest.raises(ValueError, match="cannot pass in both `dynamo_plugin` and `dynamo_backend`"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())


# -- state ---------------------------------------------------------------------------------------------------


def test_the_precision_of_a_process_cannot_be_changed() -> None:
    Accelerator(cpu=True)
    with pytest.raises(ValueError, match="AcceleratorState has already been initialized"):
        AcceleratorState(mixed_precision="bf16")
