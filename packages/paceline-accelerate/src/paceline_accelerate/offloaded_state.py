"""Access to the weights of a model that are offloaded between forward passes, by accelerate's functions.

`hooks.AlignDevicesHook` offloads them. Scripts call these functions to look at the weights or to save them.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.plan.fqn import joined
from paceline.torch_internals.modules import parameter_table
from paceline_accelerate.hooks import AlignDevicesHook, has_offloaded_params
from paceline_accelerate.module_tensors import Device, named_module_tensors, set_module_tensor_to_device

if TYPE_CHECKING:
    from paceline.accelerator import Accelerator


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Brings a module's own tensors to a device within a `with` block.

    Changes of offloaded weights in the block are lost; changes of other weights are kept.

    Args:
        module: a module with offloaded weights or without.
        execution_device: None is the device of the module's hook; a module without a hook is not moved then.
    """
    if has_offloaded_params(module):
        hook = _hook_of(module)
        hook_device = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = hook_device
        return
    if execution_device is None:
        yield
        return
    parameters = dict(module.named_parameters(recurse=False))
    try:
        for name in parameters:
            set_module_tensor_to_device(module, name, execution_device)
        yield
    finally:
        for name, original in parameters.items():
            # A copy from the meta device would have no values: the parameter itself comes back.
            if getattr(module, name).is_meta:
                parameter_table(module)[name] = original
            else:
                set_module_tensor_to_device(module, name, original.device)


def _hook_of(module: nn.Module) -> AlignDevicesHook:
    hook: Any = module._hf_hook
    assert isinstance(hook, AlignDevicesHook), "has_offloaded_params says so"
    return hook


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: MutableMapping[str, Any], device_to_put_offload: Device = "cpu"
) -> MutableMapping[str, Any]:
    """Adds one offloaded tensor to a state dict, and returns the state dict.

    Args:
        module: the module whose tensor it is.
        module_name: full name of the tensor in the model.
        state_dict: the state dict, which gets the tensor under that name.
        device_to_put_offload: the device of the tensor.
    """
    root = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload):
        for name, tensor in module.state_dict().items():
            full_name = joined(root, name)
            if full_name == module_name:
                state_dict[full_name] = tensor
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Tensor]:
    """Returns the whole state dict of a model with offloaded weights, on the CPU. One module at a time is brought there.

    Raises:
        ValueError: a weight is on the meta device, and no hook has its values.
    """
    state: dict[str, Tensor] = {}
    expected = model.state_dict()
    for module_name, module in model.named_modules():
        if not has_offloaded_params(module):
            continue
        with align_module_device(module, "cpu"):
            for name, tensor in named_module_tensors(module, recurse=_hook_of(module).place_submodules):
                full_name = joined(module_name, name)
                if full_name in expected and not tensor.is_meta:
                    state[full_name] = tensor.detach()
    for name, tensor in expected.items():
        state.setdefault(name, tensor)
    missing = [name for name, tensor in state.items() if tensor.is_meta]
    if missing:
        raise ValueError(f"These weights are on meta, and no hook says where their values are: {missing[:8]}.")
    return {name: state[name] for name in expected}


def save_whole_model(
    accelerator: Accelerator,
    model: nn.Module,
    directory: str | Path,
    max_shard_size: str | int,
    safe_serialization: bool,
) -> None:
    """Writes a model of which this process has all weights; some of them may be offloaded."""
    from paceline.checkpoint.weights.model import save_model  # imported here because it takes half a second

    if any(map(has_offloaded_params, model.modules())):
        state = get_state_dict_offloaded_model(model)
        save_model(model, directory, max_shard_size, safe_serialization, state)
        return
    names, tied = accelerator.run.prepared.names_of(model)
    module = accelerator.unwrap_model(model)
    save_model(module, directory, max_shard_size, safe_serialization, order=names, tied=tied)
