"""`accelerate.checkpointing`: functions that write and read the parts of a checkpoint folder under accelerate's file names.

Scripts call those with accelerate's names; `checkpoint` and `sharded` use the others for `save_state` and for FSDP's files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from paceline.checkpoint.agree import WriterPeers
from paceline.checkpoint.files import load_object, save_object
from paceline_accelerate.own_device import own_device
from paceline_accelerate.surroundings import load, writes_files
from paceline_accelerate.wrapping import clean_state_dict_for_safetensors

T = TypeVar("T")


def file_name(stem: str, number: int, ending: str) -> str:
    """Returns the file name of a model, an optimizer and so on: that of the first one has no number."""
    return f"{stem}.{ending}" if number == 0 else f"{stem}_{number}.{ending}"


def weights_file(folder: Path, number: int) -> Path:
    """Returns the file of a model's weights; that of safetensors if there are both."""
    safetensors_file = folder / file_name("model", number, "safetensors")
    if safetensors_file.is_file():
        return safetensors_file
    return folder / file_name("pytorch_model", number, "bin")


def agreed_by_writers(peers: WriterPeers, writes: bool, work: Callable[[], T]) -> T:
    """Runs `work` on the ranks that write files: rank 0, and with `save_on_each_node` perhaps the first rank of each node.

    Ranks: all must call; each gets rank 0's value, or raises the first error, which may be one of the script's own.
    """
    error: Exception | None = None
    value: T | None = None
    if writes:
        try:
            value = work()
        # Every rank raises it below: the other ranks would wait for this one otherwise.
        except Exception as caught:
            error = caught
    outcomes = peers.gather_object((error, value))
    for rank_error, _ in outcomes:
        if rank_error is not None:
            raise rank_error
    _, value_of_rank_0 = outcomes[0]
    return cast(T, value_of_rank_0)


def save_custom_state(obj: Any, path: str | Path, index: int = 0, save_on_each_node: bool = False) -> None:
    """Saves the state of a registered object, on the main process or on the first of each node."""
    if writes_files(save_on_each_node):
        save_object(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl")


def load_custom_state(obj: Any, path: str | Path, index: int = 0) -> None:
    """Loads the state of a registered object, which may have arrays of numpy."""
    obj.load_state_dict(load(Path(path) / f"custom_checkpoint_{index}.pkl"))


def random_streams(step: int, device_type: str | None = None) -> dict[str, Any]:
    """Returns the states of this process's random streams, and the step, as `random_states_0.pkl` holds them.

    Args:
        step: number of micro-batches so far.
        device_type: type of the device that this process computes on; None is the accelerator of this host.
    """
    streams: dict[str, Any] = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    device_type = device_type or own_device().type
    if device_type != "cpu":
        streams[f"torch_{device_type}_manual_seed"] = torch.get_device_module(device_type).get_rng_state_all()
    return streams


def set_random_streams(streams: dict[str, Any]) -> None:
    """Sets this process's random streams to states that `random_streams` returned."""
    random.setstate(streams["random_state"])
    np.random.set_state(streams["numpy_random_seed"])
    torch.set_rng_state(streams["torch_manual_seed"])
    device_type = own_device().type
    device_states = streams.get(f"torch_{device_type}_manual_seed")
    if device_states is not None:
        torch.get_device_module(device_type).set_rng_state_all(device_states)


def write_states(
    folder: Path, optimizers: Sequence[Any], schedulers: Sequence[Any], dataloaders: Sequence[Any], scaler: Any
) -> None:
    """Saves the states of everything but the models; of loaders only those that keep a position."""
    for number, optimizer in enumerate(optimizers):
        save_object(optimizer.state_dict(), folder / file_name("optimizer", number, "bin"))
    for number, scheduler in enumerate(schedulers):
        save_object(scheduler.state_dict(), folder / file_name("scheduler", number, "bin"))
    for number, loader in enumerate(dataloaders):
        if getattr(loader, "use_stateful_dataloader", False):
            save_object(loader.state_dict(), folder / file_name("dl_state_dict", number, "bin"))
    if scaler is not None:
        save_object(scaler.state_dict(), folder / "scaler.pt")


def save_accelerator_state(
    output_dir: str,
    model_states: Sequence[dict[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Saves states under accelerate's file names, and returns the folder.

    Ranks: all must call. Each saves its random streams; the main process, or the first of each node, saves the rest.
    """
    folder = Path(output_dir)
    if writes_files(save_on_each_node):
        for number, state in enumerate(model_states):
            if safe_serialization:
                tensors = clean_state_dict_for_safetensors(state)
                save_object(tensors, folder / file_name("model", number, "safetensors"), safe_serialization)
            else:
                save_object(state, folder / file_name("pytorch_model", number, "bin"))
        write_states(folder, optimizers, schedulers, dataloaders, scaler)
    save_object(random_streams(step), folder / f"random_states_{process_index}.pkl")
    return folder


def load_accelerator_state(
    input_dir: str,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Loads what `save_accelerator_state` saved; returns the values for the accelerator itself: its step.

    Args:
        map_location: as for `torch.load`; None and accelerate's "on_device" stand for the CPU.
        load_kwargs: has no effect.
        load_model_func_kwargs: for each model's `load_state_dict`.
    """
    folder = Path(input_dir)
    place = "cpu" if map_location in (None, "on_device") else map_location
    for number, model in enumerate(models):
        state = load_object(weights_file(folder, number), map_location=place)
        model.load_state_dict({**_tied(model, state), **state}, **load_model_func_kwargs)
    for number, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(load_object(folder / file_name("optimizer", number, "bin"), map_location=place))
    for number, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(load_object(folder / file_name("scheduler", number, "bin"), map_location=place))
    for number, loader in enumerate(dataloaders):
        path = folder / file_name("dl_state_dict", number, "bin")
        if getattr(loader, "use_stateful_dataloader", False) and path.is_file():
            loader.load_state_dict(load_object(path))
    if scaler is not None:
        scaler.load_state_dict(load_object(folder / "scaler.pt"))
    streams = load(folder / f"random_states_{process_index}.pkl")
    set_random_streams(streams)
    return {"step": streams.get("step", 0)}


def _tied(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of tied weights under the names that `state` lacks: a file has each weight under one name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    saved_names: dict[int, str] = {}
    for name, parameter in parameters.items():
        if name in state:
            saved_names.setdefault(id(parameter), name)
    tied_values = {}
    for name, parameter in parameters.items():
        if name not in state and id(parameter) in saved_names:
            saved_name = saved_names[id(parameter)]
            tied_values[name] = state[saved_name]
    return tied_values
