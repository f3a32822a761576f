"""accelerate's functions for models that FSDP divides: here they hold whole tensors, whatever the plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.base.errors import CheckpointError
from paceline.checkpoint.agree import agreed
from paceline.checkpoint.files import load_object, save_object
from paceline.checkpoint.state.match import Mismatch
from paceline.checkpoint.state.module_state import ModuleState
from paceline.checkpoint.weights.export import export_checkpoint
from paceline.compat.accelerate.state import PartialState
from paceline.world.sharded import is_sharded

_ONE_FILE = 1 << 60  # bytes after which a new file would begin


def _file(folder: str | Path, number: int) -> Path:
    return Path(folder) / ("pytorch_model_fsdp.bin" if number == 0 else f"pytorch_model_fsdp_{number}.bin")


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Writes a model's whole state, as accelerate does for FULL_STATE_DICT. Ranks: all; rank 0 writes."""
    state = accelerator.get_state_dict(model)
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    accelerator._folder._agree(lambda: save_object(state, _file(output_dir, model_index)))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Puts back what `save_fsdp_model` (accelerate's with FULL_STATE_DICT, or this one) wrote. Ranks: all.

    Raises:
        CheckpointError: `checkpoint-other-model`, and those of reading the file.
    """
    path = _file(input_dir, model_index)
    state = load_object(path)
    with accelerator.full_parameters(model, writeback=True), torch.no_grad():
        own = ModuleState.of(accelerator.unwrap_model(model))
        mismatch = Mismatch(
            missing={name: tuple(own.tensors[name].shape) for name in own.tensors.keys() - state.keys()},
            unexpected={name: tuple(state[name].shape) for name in state.keys() - own.raw.keys()},
        )
        if mismatch:
            raise CheckpointError.of([mismatch.problem("this one", str(path))])
        for name, tensor in own.tensors.items():
            tensor.copy_(state[name])


def merge_fsdp_weights(
    checkpoint_dir: str | Path,
    output_path: str | Path,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Makes files of whole weights from the divided ones that accelerate's FSDP saved, tensor by tensor.

    Args:
        checkpoint_dir: accelerate's `pytorch_model_fsdp_0` folder.
        output_path: folder of `model.safetensors` (or `pytorch_model.bin`), one file.
        safe_serialization: which of the two.
        remove_checkpoint_dir: whether the folder is removed afterwards.

    Ranks: all may call it, the main process does it; or one script without any.

    Raises:
        CheckpointError: `checkpoint-missing`, and those of reading and writing.
    """
    folder = Path(checkpoint_dir)
    if not (folder / ".metadata").is_file():
        raise CheckpointError(
            "checkpoint-missing",
            f"{folder} holds no divided weights.",
            why="there is no .metadata in it",
            fix=f"name the folder that accelerate wrote them to, such as {folder / 'pytorch_model_fsdp_0'}",
        )

    def merge() -> None:
        if state.is_main_process:
            export_checkpoint(folder, output_path, max_shard_size=_ONE_FILE, safe_serialization=safe_serialization)
            if remove_checkpoint_dir:
                shutil.rmtree(folder)

    state = PartialState()
    agreed(state.collectives, f"merging {folder}", merge)


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether some parameter is divided over ranks."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    """The names as they are: nothing here changes them."""
    return dict(named_params)


def enable_fsdp_ram_efficient_loading() -> None:
    """Nothing: every rank builds the model; one built on the meta device takes no memory until it is prepared."""


def disable_fsdp_ram_efficient_loading() -> None:
    """Nothing, as above."""
