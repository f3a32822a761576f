"""accelerate's functions for models that FSDP divides: here they hold whole tensors, whatever the plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from paceline.base.errors import CheckpointError
from paceline.checkpoint.agree import agreed
from paceline.checkpoint.files import load_object, save_object
from paceline.checkpoint.state.match import Mismatch
from paceline.checkpoint.state.module_state import ModuleState
from paceline.checkpoint.state.optimizer_state import OptimizerState
from paceline.checkpoint.weights.export import export_checkpoint
from paceline.compat.accelerate.state import PartialState
from paceline.world.sharded import division_of, is_sharded, whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
) -> _IncompatibleKeys:
    """Puts back what `save_fsdp_model` (accelerate's with FULL_STATE_DICT, or this one) wrote. Ranks: all.

    Returns what `load_state_dict` does where all names agree: Trainer looks at it.

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
    return _IncompatibleKeys([], [])


def _optimizer_file(folder: str | Path, number: int) -> Path:
    return Path(folder) / ("optimizer.bin" if number == 0 else f"optimizer_{number}.bin")


def _by_name(accelerator: Any, optimizer: Any, model: nn.Module) -> OptimizerState:
    """torch's optimizer inside a prepared one, and the names of its parameters."""
    module = accelerator.unwrap_model(model)
    names = {parameter: name for name, parameter in module.named_parameters()}
    return OptimizerState.of(getattr(optimizer, "optimizer", optimizer), names)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Writes an optimizer's whole state by parameter name, as accelerate does for FULL_STATE_DICT.

    Ranks: all; rank 0 writes. Each holds the whole state for a moment.

    Raises:
        CheckpointError: on every rank.
    """
    own = _by_name(accelerator, optimizer, model)
    names = list(own.parameters)
    states: dict[str, dict[str, Any]] = {}
    held_alone: dict[str, dict[str, Any]] = {}
    # `state_dict` gives states of divided rows as DTensors; inside, an optimizer under ZeRO holds plain rows.
    for number, state in own.optimizer.state_dict()["state"].items():
        parameter = own.parameters[names[number]]
        entries = {key: whole(value) for key, value in state.items()}
        is_divided = any(is_sharded(value) for value in state.values())
        if is_divided or division_of(own.optimizer, parameter) is None:
            states[names[number]] = entries
        else:
            held_alone[names[number]] = entries  # ZeRO may give a whole parameter to one rank
    for part in accelerator.collectives.gather_object(held_alone):
        states.update(part)
    groups = []
    for number, group in enumerate(own.optimizer.param_groups):
        members = [name for name, place in own.groups.items() if place == number]
        groups.append({**group, "params": members})
    state = {"state": {name: states[name] for name in own.parameters if name in states}, "param_groups": groups}
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    accelerator._folder._agree(lambda: save_object(state, _optimizer_file(output_dir, optimizer_index)))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Puts back what `save_fsdp_optimizer` (accelerate's with FULL_STATE_DICT, or this one) wrote; each rank takes its part.

    Ranks: all, at another number of processes and under another plan too.

    Raises:
        CheckpointError: `checkpoint-other-model`, and those of reading the file.
    """
    path = _optimizer_file(input_dir, optimizer_index)
    saved = load_object(path)
    own = _by_name(accelerator, optimizer, model)
    unknown = sorted(name for name in saved["state"] if name not in own.parameters)
    if unknown:
        raise CheckpointError(
            "checkpoint-other-model",
            f"{path} holds states of {len(unknown)} parameters that this optimizer does not step.",
            why=f"for example {unknown[0]!r}",
            fix="prepare the model and the optimizer that the checkpoint was saved with",
        )
    states: dict[int, dict[str, Any]] = {}
    numbers = {name: number for number, name in enumerate(own.parameters)}
    for name, parameter in own.parameters.items():
        if name not in saved["state"]:
            continue
        entries = dict(saved["state"][name])
        for key, value in entries.items():
            if is_sharded(parameter) and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                entries[key] = _like(value, parameter)
        states[numbers[name]] = entries
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["param_groups"]]
    # Under ZeRO this takes whole states, and keeps this rank's rows or parameters of them.
    own.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _like(value: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """This rank's part of a whole state, divided as its parameter is."""
    from torch.distributed.tensor import distribute_tensor  # takes a second: not before it is needed

    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


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
