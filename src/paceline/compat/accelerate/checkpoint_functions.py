"""`accelerate.checkpointing`: the functions that `save_state` is made of there, for scripts that call them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.checkpoint.files import NUMPY_ARRAYS, load_object, save_object
from paceline.compat.accelerate.surroundings import writes_files
from paceline.compat.accelerate.wrapping import clean_state_dict_for_safetensors

if TYPE_CHECKING:
    from paceline.compat.accelerate.accelerator import Accelerator


def file_name(stem: str, number: int, ending: str) -> str:
    """The name of a file in a checkpoint folder, of the first, second, ... model, optimizer and so on."""
    return f"{stem}.{ending}" if number == 0 else f"{stem}_{number}.{ending}"


def weights_file(folder: Path, number: int) -> Path:
    """The file of a model's weights; safetensors where there are both."""
    safe = folder / file_name("model", number, "safetensors")
    return safe if safe.is_file() else folder / file_name("pytorch_model", number, "bin")


def agreed_by_writers(accelerator: Accelerator, work: Callable[[], Any]) -> Any:
    """Runs `work` on the ranks that write files; every rank gets rank 0's value, or raises the first error. Ranks: all.

    Those are rank 0, and with `save_on_each_node` the first rank of each host.
    """
    error = value = None
    writes_for_node = accelerator.project_configuration.save_on_each_node and accelerator.is_local_main_process
    if accelerator.is_main_process or writes_for_node:
        try:
            value = work()
        except Exception as caught:  # raised again below, on every rank
            error = caught
    outcomes = accelerator.collectives.gather_object((error, value))
    for error, _ in outcomes:
        if error is not None:
            raise error
    return outcomes[0][1]


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Writes the state of a registered object, on the main process."""
    if writes_files(save_on_each_node):
        save_object(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl")


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """Reads it into the object."""
    with torch.serialization.safe_globals(NUMPY_ARRAYS):
        obj.load_state_dict(load_object(Path(path) / f"custom_checkpoint_{index}.pkl"))


def random_streams(step: int, device_type: str | None = None) -> dict[str, Any]:
    """The random streams of this process, and the step, as `random_states_0.pkl` holds them.

    Args:
        step: how many micro-batches there were.
        device_type: that this process computes on; None is the accelerator of this host.
    """
    streams: dict[str, Any] = {
        "step": step,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    kind = device_type or _own_device_type()
    if kind != "cpu":
        streams[f"torch_{kind}_manual_seed"] = torch.get_device_module(kind).get_rng_state_all()
    return streams


def _own_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def set_random_streams(streams: dict[str, Any], device_type: str | None = None) -> None:
    """Puts the random streams of this process back."""
    random.setstate(streams["random_state"])
    np.random.set_state(streams["numpy_random_seed"])
    torch.set_rng_state(streams["torch_manual_seed"])
    kind = device_type or _own_device_type()
    if f"torch_{kind}_manual_seed" in streams:
        torch.get_device_module(kind).set_rng_state_all(streams[f"torch_{kind}_manual_seed"])


def write_states(
    folder: Path, optimizers: Sequence[Any], schedulers: Sequence[Any], dataloaders: Sequence[Any], scaler: Any
) -> None:
    """Writes all but the weights; of loaders those that keep a position."""
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
    """Writes states under accelerate's file names; each process its random streams, the main one all else. Ranks: all."""
    folder = Path(output_dir)
    if writes_files(save_on_each_node):
        for number, state in enumerate(model_states):
            if safe_serialization:
                tensors = clean_state_dict_for_safetensors(state)
                save_object(tensors, folder / file_name("model", number, "safetensors"), True)
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
    """Reads what `save_accelerator_state` wrote; returns what belongs to the accelerator: its step."""
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
    with torch.serialization.safe_globals(NUMPY_ARRAYS):
        streams = load_object(folder / f"random_states_{process_index}.pkl")
    set_random_streams(streams)
    return {"step": streams.get("step", 0)}


def _tied(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Values of tied weights under the names that a file leaves out: it holds each once."""
    saved_names: dict[int, str] = {}
    missing = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if name in state:
            saved_names.setdefault(id(parameter), name)
    for name, parameter in parameters.items():
        if name not in state and id(parameter) in saved_names:
            missing[name] = state[saved_names[id(parameter)]]
    return missing
