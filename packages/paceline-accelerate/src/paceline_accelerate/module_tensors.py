"""Functions over a module's tensors by name: they list them, find tied ones, and replace one."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.plan.fqn import joined
from paceline.torch_internals.modules import buffer_table, parameter_table
from paceline_accelerate.torch_internals.kept import non_persistent_buffers
from paceline_doors.absent import refuse

Device = int | str | torch.device
# Address of a tied weight's values -> device -> the tensor that stands for it there (`dispatch_model` makes one).
TiedParamsMap = MutableMapping[int, dict[Any, Tensor]]


def recursive_getattr(obj: object, attr: str) -> Any:
    """Returns the attribute of a dotted name."""
    return operator.attrgetter(attr)(obj)


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Returns the names of the buffers that a state dict does not have.

    Args:
        module: any module.
        recurse: whether buffers of submodules are included.
        fqns: whether names are full names from `module` on; if not, they are names within the submodule.
    """
    if not recurse:
        return non_persistent_buffers(module)
    names: set[str] = set()
    for module_name, submodule in module.named_modules():
        for name in non_persistent_buffers(submodule):
            qualified_name = joined(module_name, name)
            names.add(qualified_name if fqns else name)
    return names


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of parameters, then of buffers; those of submodules only with `recurse`."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out: set[str] = set()
    if remove_non_persistent:
        left_out = get_non_persistent_buffers(module, recurse=recurse, fqns=True)
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in left_out:
            yield name, buffer


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Lists groups of names that stand for one parameter."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Ties each group of names again, to the first of its parameters that is not on meta."""
    for group in tied_params:
        parameters = [recursive_getattr(model, name) for name in group]
        with_values = [parameter for parameter in parameters if not parameter.is_meta]
        if not with_values:
            continue
        shared = with_values[0]
        for name in group:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, shared)


def table_with(owner: nn.Module, name: str) -> dict[str, Tensor | None]:
    """Returns the module's dictionary of buffers if it has this name, and else its dictionary of parameters."""
    buffers = buffer_table(owner)
    return buffers if name in buffers else parameter_table(owner)


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Returns device, address and number of bytes of a tensor's storage; the address is 0 for a sparse tensor."""
    if tensor.layout != torch.strided:
        return tensor.device, 0, tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Whether two devices are the same, where "cuda" means "cuda:0"."""
    if first_device.type != second_device.type:
        return False
    if first_device.type == "cpu":
        return first_device == second_device
    return (first_device.index or 0) == (second_device.index or 0)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedParamsMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Moves a parameter or buffer to a device, or replaces it by `value` there.

    Args:
        module: the module that has the tensor, or one around it.
        tensor_name: dotted name in `module`.
        device: target device; "meta" drops the values.
        value: new values of the same shape; they are required if the tensor is on meta.
        dtype: dtype of the new tensor; None keeps that of the old one, also if `value` has another.
        fp16_statistics: belongs to 8-bit weights and is refused.
        tied_params_map: copies of tied weights by address and device; a copy that is already on `device` is used, and a new
            copy is added.
        non_blocking: whether copies to an accelerator are asynchronous.
        clear_cache: has no effect, because torch's allocator frees what it needs.

    Raises:
        ValueError: no such tensor, a value of another shape, or no value.
    """
    if fp16_statistics is not None:
        refuse("fp16_statistics", "8-bit weights are not carried", "load the model unquantised")
    owner_name, _, name = tensor_name.rpartition(".")
    owner = recursive_getattr(module, owner_name) if owner_name else module
    tensors: dict[str, Any] = table_with(owner, name)
    if name not in tensors:
        raise ValueError(f"{owner} has no parameter or buffer named {name}.")
    old = getattr(owner, name)
    if value is not None and value.shape != old.shape:
        raise ValueError(
            f"{tensor_name} has the shape {old.shape}, and the value is a tensor of shape {value.shape}: it belongs "
            "to another model."
        )
    # Before the device is read: accelerate reports a missing value also for a device that this host does not have.
    if value is None and old.is_meta and str(device) != "meta":
        raise ValueError(f"{tensor_name} is on the meta device, we need a `value` to put it on {device}.")
    target = torch.device(device)

    # A tied weight that was moved to the device under another name is shared and not copied again, which would untie it.
    source = old if value is None else value
    copies = tied_params_map.get(source.data_ptr()) if tied_params_map else None
    if copies is not None and device in copies:
        tensors[name] = copies[device]
        return
    takes_dtype = dtype is not None and target.type == "meta"
    if value is not None or old.device != target or takes_dtype:
        tensors[name] = _replacement(old, value, target, dtype, non_blocking)
    if copies is not None and target.type != "meta":
        copies[device] = tensors[name]


def _replacement(
    old: Tensor, value: Tensor | None, device: torch.device, dtype: str | torch.dtype | None, non_blocking: bool
) -> Tensor:
    """Makes the tensor that replaces `old`, of the same class and on `device`; integer values are not cast to `dtype`."""
    wanted = dtype_of(dtype)
    if value is None:
        # Without new values the dtype changes only on the way to meta, where the caller writes the cast values elsewhere.
        source = old
        new_dtype = wanted if device.type == "meta" and is_fractional(old.dtype) else None
    else:
        source = value
        new_dtype = wanted if is_fractional(value.dtype) else None
        if wanted is None:
            new_dtype = old.dtype
    new = source.detach().to(device, new_dtype, non_blocking=non_blocking)
    if not isinstance(old, nn.Parameter):
        return new
    requires_grad = old.requires_grad and is_fractional(new.dtype)
    return type(old)(new, requires_grad=requires_grad)


def is_fractional(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating-point or complex; integers and booleans are never cast together with the weights."""
    return dtype.is_floating_point or dtype.is_complex


def dtype_of(dtype: Any) -> Any:
    """Returns torch's dtype for a text such as "float16" or "torch.float16"; anything else is returned unchanged."""
    # `type(...) is str` and not `isinstance`: members of accelerate's enumeration of dtypes that torch does not have are
    # texts too, and stay as they are.
    return getattr(torch, dtype.removeprefix("torch.")) if type(dtype) is str else dtype
