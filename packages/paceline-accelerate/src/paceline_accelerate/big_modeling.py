"""`accelerate.big_modeling`: runs models that are larger than one device, by a map of modules to devices."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.errors import PlanError
from paceline_accelerate import device_map as device_maps
from paceline_accelerate.device_map import (
    DeviceMap,
    check_tied_parameters_on_same_device,
    infer_auto_device_map,
    without_folder,
)
from paceline_accelerate.hook_attachment import attach_align_device_hook, attach_align_device_hook_on_blocks
from paceline_accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    SkipKeys,
    UserCpuOffloadHook,
    _accelerate_added_attributes,
    add_hook_to_module,
)
from paceline_accelerate.loading import load_checkpoint_in_model
from paceline_accelerate.module_sizes import Dtype, Memory, get_balanced_memory
from paceline_accelerate.module_tensors import (
    Device,
    TiedParamsMap,
    find_tied_parameters,
    recursive_getattr,
    retie_parameters,
)
from paceline_accelerate.offload import (
    OffloadedWeightsLoader,
    Path,
    extract_submodules_state_dict,
    offload_state_dict,
)
from paceline_accelerate.surroundings import parse_flag_from_env
from paceline_large.inference.placing import built_on

log = logging.getLogger("accelerate.big_modeling")
_PLACEMENTS = ("auto", "balanced", "balanced_low_0", "sequential")


def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> AbstractContextManager[Any, Any]:
    """Puts parameters that modules register in the block on a device, and with `include_buffers` also their buffers.

    Where it is None, the variable `ACCELERATE_INIT_INCLUDE_BUFFERS` decides.
    """
    device = torch.device(device)
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS")
    # A device is torch's own context, which makes all new tensors on it.
    return device if include_buffers else built_on(device)


def init_empty_weights(include_buffers: bool | None = None) -> Any:
    """Makes models that are constructed in the block without weights: their parameters are on the device "meta"."""
    return init_on_device("meta", include_buffers)


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keeps all weights in CPU memory; each module moves its own to a device for its forward.

    Args:
        model: is changed in place.
        execution_device: device of the forwards; None is the device of the first parameter.
        offload_buffers: whether buffers are offloaded too.
        state_dict: the weights; None takes those of the model.
        preload_module_classes: as in `attach_align_device_hook`.
    """
    if execution_device is None:
        execution_device = next(model.parameters()).device
    if state_dict is None:
        # Copied now, because the hooks replace the model's own tensors by some on meta.
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    return _offload(model, execution_device, offload_buffers, state_dict, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: Path,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keeps all weights in files; each module reads its own for its forward.

    Args:
        model: is changed in place.
        offload_dir: folder of the files; if it has an `index.json`, its files are used and nothing is written.
        execution_device: device of the forwards; None is the device of the first parameter.
        offload_buffers: whether buffers are offloaded too.
        preload_module_classes: as in `attach_align_device_hook`.

    Raises:
        CheckpointError: `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`.
    """
    if not os.path.isfile(os.path.join(offload_dir, "index.json")):
        offload_state_dict(offload_dir, model.state_dict())
    if execution_device is None:
        execution_device = next(model.parameters()).device
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, execution_device, offload_buffers, weights, preload_module_classes)


def _offload(
    model: nn.Module,
    device: Device,
    offload_buffers: bool,
    weights: Mapping[str, Tensor],
    preload_module_classes: Sequence[str] | None,
) -> nn.Module:
    # The model's own hook only returns outputs to the device of the inputs; those of its modules move weights.
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )
    return model


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keeps a model on the CPU until its forward; it stays on its device until `offload` of the hook is called.

    Args:
        model: is changed in place.
        execution_device: device of the forward; None is the first accelerator, or the CPU.
        prev_module_hook: hook of the model that runs before; that model is offloaded when this one begins.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Path | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Spreads a model over devices: each module computes on its own device, and inputs are moved there.

    Args:
        model: is changed in place.
        device_map: name of a module -> device, of which "disk" is one. Modules on "disk" are offloaded, and so are those on
            "cpu" unless the main device is "cpu" or "mps": their weights are moved to `main_device` for their forward.
        main_device: None is the first device of the map that is neither "cpu" nor "disk", or else the CPU.
        state_dict: weights of modules on "cpu"; None takes those of the model.
        offload_dir: folder for weights of modules on "disk", or one that already has them.
        offload_index: says which file has which weight; None is the index of `offload_dir`.
        offload_buffers: whether buffers are offloaded too.
        skip_keys: names of keyword arguments and of keys of outputs that are not moved.
        preload_module_classes: as in `attach_align_device_hook`.
        force_hooks: whether hooks are attached even if the whole model is on one device.

    Raises:
        PlanError: `device-map-incomplete`, `offload-folder`.
        CheckpointError: `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`.
    """
    _check_as_served(model, device_map)
    devices = list(dict.fromkeys(device_map.values()))
    # On a single device nothing has to be moved between modules, so the model needs no hooks.
    if len(devices) == 1 and devices != ["disk"] and not force_hooks:
        model.to(devices[0])
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model

    if main_device is None:
        main_device = next((device for device in devices if device not in ("cpu", "disk")), "cpu")
    # If the main device computes in the host's memory, modules on "cpu" already are where they compute.
    offloading = ["disk"]
    if main_device not in ("cpu", "mps"):
        offloading = ["cpu", "disk"]
    is_offloaded = {name: device in offloading for name, device in device_map.items()}
    # Where each module computes: offloaded weights come to the main device for it.
    execution: dict[str, Any] = dict(device_map)
    execution.update((name, main_device) for name in device_map if is_offloaded[name])
    # The whole model ("") needs a device too, for a hook that moves its inputs there and its output back.
    execution.setdefault("", main_device)
    weights = _offloaded_weights(model, device_map, is_offloaded, state_dict, offload_dir, offload_index)

    tied_groups = find_tied_parameters(model)
    check_tied_parameters_on_same_device(tied_groups, device_map)
    attach_align_device_hook_on_blocks(
        model,
        execution_device=execution,
        offload=is_offloaded,
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=_addresses(model, tied_groups),
    )
    offloaded_to = [device for device in offloading if device in device_map.values()]
    if offloaded_to:
        where = " and ".join(offloaded_to)
        log.warning("Some parameters are on the meta device between forward passes: the map sends them to %s.", where)
    # Moving tied parameters one by one made separate parameters of them.
    retie_parameters(model, tied_groups)
    _guard_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _check_as_served(model: nn.Module, device_map: DeviceMap) -> None:
    """Checks a device map with the function of the module `accelerate.big_modeling`, where transformers may replace it."""
    served = sys.modules.get("accelerate.big_modeling")
    check: Callable[..., None] = device_maps.check_device_map
    if served is not None:
        check = vars(served).get("check_device_map", check)
    check(model, device_map)


def _offloaded_weights(
    model: nn.Module,
    device_map: DeviceMap,
    is_offloaded: Mapping[str, bool],
    state_dict: Mapping[str, Tensor] | None,
    offload_dir: Path | None,
    offload_index: Mapping[str, Mapping[str, Any]] | None,
) -> Mapping[str, Tensor] | None:
    """Returns the mapping from which offloaded weights are read, after writing those for the disk if they are not there."""
    in_memory: list[str] = []
    on_disk: list[str] = []
    for name, device in device_map.items():
        if device == "disk":
            on_disk.append(name)
        elif is_offloaded[name]:
            in_memory.append(name)
    if on_disk and offload_dir is None and offload_index is None:
        raise without_folder(model, device_map)
    # Only the offloaded part: a mapping to the other tensors would keep them in memory a second time after a move.
    if in_memory and state_dict is None:
        state_dict = extract_submodules_state_dict(model.state_dict(), in_memory)
    is_written = offload_dir is not None and os.path.isfile(os.path.join(offload_dir, "index.json"))
    if on_disk and offload_dir is not None and offload_index is None and not is_written:
        offload_state_dict(offload_dir, extract_submodules_state_dict(model.state_dict(), on_disk))
    if state_dict is None and not on_disk:
        return None
    # With a folder the loader reads its index, which need not be there if nothing is on the disk.
    folder = None
    if on_disk:
        folder = offload_dir
    return OffloadedWeightsLoader(state_dict, folder, offload_index)


def _addresses(model: nn.Module, tied_groups: Sequence[Sequence[str]]) -> TiedParamsMap:
    """Makes the map of tied weights: for each address it will hold the copies on devices that already exist."""
    addresses: TiedParamsMap = {}
    for group in tied_groups:
        for name in group:
            parameter = recursive_getattr(model, name)
            # On meta all addresses are 0 and identify nothing.
            if not parameter.is_meta:
                addresses[parameter.data_ptr()] = {}
    return addresses


def _guard_moves(model: nn.Module) -> None:
    """Makes `to`, `cuda` and `xpu` warn, and raise if weights are offloaded, because the hooks would not follow the move."""
    for name in _accelerate_added_attributes:
        guarded = functools.partial(_guarded, model, name)
        setattr(model, name, functools.update_wrapper(guarded, getattr(model, name)))


def _guarded(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls `model.NAME(...)` after a warning; it is defined at the top level so that such a model can be pickled.

    Raises:
        RuntimeError: if weights are offloaded.
    """
    log.warning("You shouldn't move a model that is dispatched using accelerate hooks: they do not follow it.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError(
            "You can't move a model that has some modules offloaded to cpu or disk: its weights are not in it."
        )
    return getattr(type(model), name)(model, *args, **kwargs)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Path,
    device_map: str | DeviceMap | None = None,
    max_memory: Memory | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: Path | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Calls `load_checkpoint_in_model` and then `dispatch_model`.

    Args:
        model: on meta, or with weights.
        checkpoint: a file of weights, an index, or a folder with one.
        device_map: a map, or "auto", "balanced", "balanced_low_0" or "sequential", which make one; None only loads.
        max_memory: as in `get_max_memory`, for a map that is made here.
        no_split_module_classes: names of classes that stay on one device, for a map that is made here.
        offload_folder: folder for modules on "disk".
        others: as in `load_checkpoint_in_model` and `dispatch_model`.

    Raises:
        PlanError: `device-map-name`, `device-map-incomplete`, `offload-folder`.
        CheckpointError: as in `load_checkpoint_in_model`.
    """
    if isinstance(device_map, str):
        device_map = _named_map(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    if device_map is not None:
        # `dispatch_model` checks the map too, but only after the weights have been read, which may take minutes.
        _check_as_served(model, device_map)
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _named_map(
    model: nn.Module,
    name: str,
    max_memory: Memory | None,
    whole_classes: Sequence[str] | None,
    dtype: Dtype | None,
    offload_buffers: bool,
) -> DeviceMap:
    """Makes the device map that "auto", "balanced", "balanced_low_0" or "sequential" stands for."""
    if name not in _PLACEMENTS:
        raise PlanError(
            "device-map-name",
            f"device_map={name!r} is no way to make a device map.",
            why=f"please choose {', '.join(map(repr, _PLACEMENTS))}, or give a dictionary such as {{'': 'cpu'}}",
            fix="write device_map='auto'",
        )
    if name != "sequential":
        low_zero = name == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, whole_classes, dtype, low_zero=low_zero)
    return infer_auto_device_map(model, max_memory, whole_classes, dtype, offload_buffers=offload_buffers)
