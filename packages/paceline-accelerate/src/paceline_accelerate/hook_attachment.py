"""Which modules of a model get an `AlignDevicesHook`, and of which kind.

attach_align_device_hook              every module that has tensors of its own
attach_execution_device_hook          every module that holds tensors at any depth: inputs go to one device
attach_align_device_hook_on_blocks    by tables of blocks: device, and whether it is offloaded
attach_layerwise_casting_hooks        linear and convolution layers: stored in a small dtype
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.plan.fqn import joined
from paceline_accelerate.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from paceline_accelerate.hooks import AlignDevicesHook, LayerwiseCastingHook, SkipKeys, add_hook_to_module
from paceline_accelerate.module_tensors import Device, TiedParamsMap, named_module_tensors
from paceline_accelerate.offload import PrefixedDataset


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParamsMap | None = None,
) -> None:
    """Lets a module, and all inside it that hold tensors, bring their inputs to a device; earlier hooks stay.

    Args:
        execution_device: where inputs and weights go.
        preload_module_classes: names of classes that are not looked into.
        others: as in `attach_align_device_hook`.
    """
    if not hasattr(module, "_hf_hook") and len(module.state_dict()) > 0:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParamsMap | None = None,
) -> None:
    """Attaches an `AlignDevicesHook` to each module that has tensors of its own; after an earlier hook.

    Args:
        module: changed in place.
        execution_device: where the forward of each runs.
        offload: weights are on meta between forwards.
        weights_map: name -> values, by names of the whole model.
        offload_buffers: buffers are offloaded too.
        module_name: of `module` in the whole model.
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: names of classes whose modules bring the weights of all modules inside them at once:
            those that use weights of a submodule without calling it.
        tied_params_map: see `set_module_tensor_to_device`.
    """

    def attach(part: nn.Module, name: str) -> None:
        brings_all = offload and type(part).__name__ in (preload_module_classes or ())
        if brings_all or next(named_module_tensors(part), None) is not None:
            prefix = f"{name}." if name else ""
            hook = AlignDevicesHook(
                execution_device=execution_device,
                offload=offload,
                weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
                offload_buffers=offload_buffers,
                place_submodules=brings_all,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(part, hook, append=True)
        if not brings_all:
            for child_name, child in part.named_children():
                attach(child, joined(name, child_name))

    attach(module, module_name)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedParamsMap | None = None,
) -> None:
    """Attaches the hooks that the blocks of a model need, block by block.

    Args:
        module: changed in place.
        execution_device: of the whole module, or block -> device.
        offload: whether the weights are on meta between forwards, or block -> that.
        others: as in `attach_align_device_hook`.
    """
    hook_options: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}

    def attach_offloading(part: nn.Module, device: Any, name: str) -> None:
        attach_align_device_hook(
            part,
            device,
            offload=True,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            module_name=name,
            preload_module_classes=preload_module_classes,
            **hook_options,
        )

    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        # Without tables of blocks the whole module is one block.
        if offload:
            attach_offloading(module, execution_device, module_name)
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **hook_options)
            add_hook_to_module(module, hook)
        return
    devices, is_offloaded = _tables_of_blocks(execution_device, offload)

    def attach_to_block(part: nn.Module, name: str) -> None:
        device = devices[name]
        is_root = name == ""
        if is_offloaded[name]:
            attach_offloading(part, device, name)
            # A block without tensors of its own got no hook, but its inputs have to be moved too.
            if not hasattr(part, "_hf_hook"):
                add_hook_to_module(part, AlignDevicesHook(device, io_same_device=is_root, **hook_options))
        else:
            hook = AlignDevicesHook(
                device, offload_buffers=offload_buffers, io_same_device=is_root, place_submodules=True, **hook_options
            )
            add_hook_to_module(part, hook)
        # The block's own forward may make tensors on the CPU and pass them to a module inside: these hooks move them too.
        attach_execution_device_hook(part, device, skip_keys, preload_module_classes, tied_params_map)

    def attach(part: nn.Module, name: str) -> None:
        """Attaches the hooks of a block or of the root; a module around blocks is only searched for them."""
        if name in devices and name in is_offloaded:
            attach_to_block(part, name)
        elif name == "":
            # The hook of the model itself moves its output back to the device of its input.
            add_hook_to_module(part, AlignDevicesHook(devices.get(""), io_same_device=True, **hook_options))
        for child_name, child in part.named_children():
            attach(child, joined(name, child_name))

    attach(module, module_name)


def _tables_of_blocks(
    execution_device: Device | Mapping[str, Device] | None, offload: bool | Mapping[str, bool]
) -> tuple[Mapping[str, Any], Mapping[str, bool]]:
    """Returns block -> device and block -> whether it is offloaded, where at least one argument is such a table."""
    if not isinstance(offload, Mapping):
        assert isinstance(execution_device, Mapping), "without any table the module is one block"
        return execution_device, dict.fromkeys(execution_device, offload)
    if not isinstance(execution_device, Mapping):
        return dict.fromkeys(offload, execution_device), offload
    return execution_device, offload


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keeps the weights of linear and convolution layers in a small dtype between their forwards.

    Args:
        module: changed in place.
        storage_dtype: between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: in a forward.
        skip_modules_pattern: regular expressions; modules whose names have one are left as they are.
        skip_modules_classes: modules of these classes are left as they are.
        non_blocking: copies do not wait.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())
    skipped_classes = skip_modules_classes or ()

    def attach(part: nn.Module, name: str) -> None:
        has_skipped_name = any(re.search(pattern, name) for pattern in patterns)
        if has_skipped_name or isinstance(part, skipped_classes):
            return
        if isinstance(part, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(part, hook, append=True)
            return
        for child_name, child in part.named_children():
            attach(child, joined(name, child_name))

    attach(module, "")
