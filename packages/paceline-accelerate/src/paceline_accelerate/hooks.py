"""`accelerate.hooks`: code that runs before and after a module's forward and may change its arguments and its output.

    add_hook_to_module(module, hook)     module.forward is replaced, and kept as module._old_forward
      hook.init_hook(module)
    module(...)
      hook.pre_forward(module, ...)      e.g. weights come to their device
      module._old_forward(...)
      hook.post_forward(module, output)  e.g. they leave it again
    remove_hook_from_module(module)      hook.detach_hook(module), and the old forward again

The attributes `_hf_hook` and `_old_forward` have accelerate's names: transformers, peft and diffusers read them.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from paceline.torch_internals.modules import parameter_table
from paceline.world.tree import all_on
from paceline_accelerate.module_tensors import (
    Device,
    TiedParamsMap,
    named_module_tensors,
    set_module_tensor_to_device,
    table_with,
)
from paceline_accelerate.nested import find_device, send_to_device
from paceline_accelerate.own_device import own_device

SkipKeys = str | list[str] | None
# Methods that `dispatch_model` replaces by ones that warn; libraries import this list by accelerate's name.
_accelerate_added_attributes = ["to", "cuda", "xpu"]


class ModelHook:
    """A hook that does nothing; subclasses override what they need.

    Attributes:
        no_grad: whether the forward runs under `torch.no_grad()`.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Is called when the hook is attached; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Is called before each forward; returns the arguments to use."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Is called after each forward; returns the output to use."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Is called when the hook is removed; returns the module."""
        return module


class SequentialHook(ModelHook):
    """Runs several hooks, in their order, wherever one hook would run."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attaches each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Passes the arguments from hook to hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Passes the output from hook to hook."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detaches each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a module with a hook.

    It is defined at the top level of this file, and not inside `add_hook_to_module`, so that a hooked model can be pickled.
    """
    args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
    if module._hf_hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


class _GraphForward:
    """Runs the forward that the class of a module of torch.fx has now; `recompile` gives the class another one.

    Raises:
        pickle.PicklingError: when it is pickled. torch.fx pickles such a module without its hooked forward, so that the hook
            would be lost without a word.
    """

    def __init__(self, module: GraphModule) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GraphForward:
        # torch.fx copies the graph and leaves the attributes of the module behind, so that a copy has no hook.
        return self

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "A module of torch.fx cannot be pickled with its hook. Call `remove_hook_from_module(module, recurse=True)` before."
        )


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attaches a hook to a module and replaces one that it has already.

    Args:
        module: is changed in place.
        hook: the hook to attach.
        append: whether an earlier hook is kept; it then runs first.
    """
    if append and getattr(module, "_hf_hook", None) is not None:
        earlier = module._hf_hook
        remove_hook_from_module(module)
        hook = SequentialHook(earlier, hook)  # type: ignore[arg-type]
    old_forward: Any
    # `forward` of a module with a hook already is the hooked one: keeping that as `_old_forward` would run hooks twice.
    if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward"):
        old_forward = module._old_forward
    else:
        old_forward = module.forward
        module._old_forward = old_forward
        if isinstance(module, GraphModule):
            # The bound method would be the code of the graph as it is now, also after the graph was changed.
            module._old_forward = _GraphForward(module)  # type: ignore[assignment]
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    forward = functools.partial(_hooked_forward, module)
    # Libraries ask `inspect.signature` which arguments a model takes; it follows the `__wrapped__` that is set here.
    module.forward = functools.update_wrapper(forward, old_forward)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Removes the hook of a module, and with `recurse` those of all modules inside it."""
    if hasattr(module, "_hf_hook"):
        module._hf_hook.detach_hook(module)  # type: ignore[operator, union-attr]
        delattr(module, "_hf_hook")
    if hasattr(module, "_old_forward"):
        if isinstance(module._old_forward, _GraphForward):
            # The forward of the class, which `recompile` changes.
            vars(module).pop("forward", None)
        else:
            module.forward = module._old_forward  # type: ignore[assignment]
        delattr(module, "_old_forward")
    for name in _accelerate_added_attributes:
        vars(module).pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Removes all hooks of a module and of the modules inside it."""
    remove_hook_from_module(module, recurse=True)


class AlignDevicesHook(ModelHook):
    """Moves a module's inputs, and its weights if they are offloaded, to one device for the forward.

    Args:
        execution_device: device of the forward; None moves nothing.
        offload: whether weights are on meta between forwards and are taken from `weights_map` for each forward.
        io_same_device: whether outputs are moved to the device of the inputs.
        weights_map: mapping of names to values, read anew at each forward; None makes one in CPU memory.
        offload_buffers: whether buffers are offloaded too; if not, they stay on `execution_device`.
        place_submodules: whether this hook also handles the tensors of submodules.
        skip_keys: names of keyword arguments and of keys of outputs that are not moved.
        tied_params_map: see `set_module_tensor_to_device`.
    """

    # The tensors on meta that stand for offloaded ones between forwards. They are in a slot because libraries that look at
    # `vars(hook)` are to see accelerate's fields alone.
    __slots__ = ("_empty",)

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: SkipKeys = None,
        tied_params_map: TiedParamsMap | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.input_device: torch.device | None = None
        self.param_original_devices: dict[str, torch.device] = {}
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self.tied_params_map = tied_params_map
        # Address and device of each tied weight that this hook moved to a device and has to remove after its forward.
        self.tied_pointers_to_remove: set[tuple[int, Any]] = set()
        self._empty: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        fields = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        values = []
        for field in fields:
            value = getattr(self, field)
            if field == "skip_keys":  # accelerate shows this one with its quotes
                value = repr(value)
            values.append(f"{field}={value}")
        return f"AlignDevicesHook({', '.join(values)})"

    def _offloaded_names(self, module: nn.Module) -> list[str]:
        """Lists the tensors that are on meta between forwards.

        Buffers that are not persistent are not among them: a state dict does not have them, and so `weights_map` has neither.
        """
        tensors = named_module_tensors(
            module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
        )
        return [name for name, _ in tensors]

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Moves the weights to their device, or to meta if they are offloaded."""
        if not self.offload:
            if self.execution_device is not None:
                for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                    self._move(module, name)
            return module
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        offloaded = self._offloaded_names(module)
        if self.weights_map is None:
            to_offload = named_module_tensors(module, self.offload_buffers, self.place_submodules)
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in to_offload}
        for name in offloaded:
            # First, because on meta the tensor has no address by which it can be known.
            self._follow_tied(tensors[name], name)
            set_module_tensor_to_device(module, name, "meta")
        if self.execution_device is not None:
            # Buffers that are not offloaded have to be where the forward runs, once and for all.
            for name, _ in module.named_buffers(recurse=self.place_submodules):
                if name not in offloaded:
                    self._move(module, name)
        return module

    def _move(self, module: nn.Module, name: str) -> None:
        """Moves a tensor to the device of the forward."""
        device: Any = self.execution_device
        set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map)

    def _follow_tied(self, tensor: Tensor, name: str) -> None:
        """Enters the new address of a tied weight's values in `tied_params_map`, which knows tied weights by address."""
        assert self.weights_map is not None, "made by init_hook"
        if self.tied_params_map is not None and tensor.data_ptr() in self.tied_params_map:
            self.tied_params_names.add(name)
            self.tied_params_map[self.weights_map[name].data_ptr()] = {}

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moves weights and inputs to the device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            self._bring(module)
        if self.execution_device is None:
            return args, kwargs
        device = torch.device(self.execution_device)
        # `send_to_device` rebuilds every container, which costs more than a look at a few tensors.
        if not all_on(args, device):
            args = send_to_device(args, self.execution_device)
        if not all_on(kwargs, device):
            kwargs = send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys)
        return args, kwargs

    def _bring(self, module: nn.Module) -> None:
        """Replaces each tensor on meta by its values on the device."""
        assert self.weights_map is not None and self.execution_device is not None, "an attached hook has both"
        device = torch.device(self.execution_device)
        self.tied_pointers_to_remove = set()
        for name, tensors, own_name in self._slots(module):
            value = self.weights_map[name]
            empty = tensors[own_name]
            if empty.is_meta:
                self._empty[name] = empty
            if self._is_first_to_bring(value):
                self.tied_pointers_to_remove.add((value.data_ptr(), self.execution_device))
            is_tied = bool(self.tied_params_map) and value.data_ptr() in self.tied_params_map  # type: ignore[operator]
            is_ready = value.device == device and value.dtype == empty.dtype and value.shape == empty.shape
            # A value that needs no copy is put in place directly: this runs for each module at each forward.
            if is_tied or not is_ready or type(empty) is not nn.Parameter:
                set_module_tensor_to_device(module, name, device, value=value, tied_params_map=self.tied_params_map)
            else:
                tensors[own_name] = nn.Parameter(value, empty.requires_grad)

    def _slots(self, module: nn.Module) -> list[tuple[str, dict[str, Any], str]]:
        """Lists the offloaded tensors: the name, the dictionary that holds the tensor, and the tensor's name in there."""
        slots: list[tuple[str, dict[str, Any], str]] = []
        if not self.place_submodules and not self.offload_buffers:
            # This runs before and after each forward of each module, so the usual case does not walk over the module.
            parameters: dict[str, Any] = parameter_table(module)
            for name, parameter in parameters.items():
                if parameter is not None:
                    slots.append((name, parameters, name))
            return slots
        for name in self._offloaded_names(module):
            owner_name, _, own_name = name.rpartition(".")
            owner = module.get_submodule(owner_name)
            slots.append((name, table_with(owner, own_name), own_name))
        return slots

    def _is_first_to_bring(self, value: Tensor) -> bool:
        """Whether no module has moved this tied weight to the device yet: the hook that moves it also removes it."""
        if not self.tied_params_map:
            return False
        copies = self.tied_params_map.get(value.data_ptr())
        return copies is not None and self.execution_device not in copies

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Removes offloaded weights from the device, and moves the output to the device of the input."""
        if self.offload:
            for name, tensors, own_name in self._slots(module):
                weight = tensors[own_name]
                empty = self._empty.get(name)
                # The same meta tensor is used again, unless the forward has replaced the weight by another kind.
                if empty is None or empty.shape != weight.shape or empty.dtype != weight.dtype:
                    set_module_tensor_to_device(module, name, "meta")
                else:
                    tensors[own_name] = empty
            for address, device in self.tied_pointers_to_remove:
                assert self.tied_params_map is not None, "it has what was brought"
                self.tied_params_map[address].pop(device, None)
            self.tied_pointers_to_remove = set()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Moves offloaded weights back to their original devices; those that were on meta stay there."""
        if self.offload:
            assert self.weights_map is not None, "made by init_hook"
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    value = self.weights_map.get(name)
                    set_module_tensor_to_device(module, name, device, value=value)
        return module


class CpuOffload(ModelHook):
    """Keeps a module on the CPU until its forward; afterwards the module stays on the device.

    Args:
        execution_device: device of the forward; None is the first accelerator, or the CPU.
        prev_module_hook: hook of the module that runs before, which is offloaded first.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        if execution_device is None:
            execution_device = own_device()
            if execution_device.type != "cpu":
                execution_device = torch.device(execution_device.type, 0)
        self.execution_device = execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Moves the module to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Moves the earlier module to the CPU, and this one and its inputs to the device."""
        # First the earlier one leaves, so that the device never holds both.
        if self.prev_module_hook is not None and self.prev_module_hook.model is not module:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        args = send_to_device(args, self.execution_device)
        kwargs = send_to_device(kwargs, self.execution_device)
        return args, kwargs


class UserCpuOffloadHook:
    """Lets the user offload a model by hand; `cpu_offload_with_hook` returns it.

    Args:
        model: the model that has the hook.
        hook: a `CpuOffload`.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Moves the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Removes the hook; the model stays on its device."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in a small dtype, and casts them to another for its forward.

    Args:
        storage_dtype: dtype between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: dtype in the forward.
        non_blocking: whether copies are asynchronous.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Casts the weights to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Casts the weights to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Casts the weights back to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module's weights are offloaded and loaded again for each forward."""
    hook = getattr(module, "_hf_hook", None)
    return isinstance(hook, AlignDevicesHook) and hook.offload
