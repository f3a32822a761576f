"""`accelerate.utils.modeling` and `big_modeling`: what can be said of a model without spreading it over devices."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from paceline.checkpoint.files import read_tensors
from paceline.checkpoint.weights.export import parse_size
from paceline.checkpoint.weights.model import load_model
from paceline.compat.absent import refuse
from paceline.precision.policy import unwrap_forward

_HALVES = {"float8": 1, "int4": 0.5, "int2": 0.25}


@contextmanager
def init_on_device(device: Any, include_buffers: bool | None = None) -> Iterator[None]:
    """Parameters that modules register inside come to lie on a device (buffers too, where that is asked for)."""
    device = torch.device(device)
    if include_buffers:
        with device:
            yield
        return

    def place(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.device == device:
            return parameter
        moved = type(parameter)(parameter.to(device), requires_grad=parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        return moved

    hook = register_module_parameter_registration_hook(place)
    try:
        yield
    finally:
        hook.remove()


def init_empty_weights(include_buffers: bool | None = None) -> Any:
    """Models made inside have shapes and no weights (device "meta")."""
    return init_on_device("meta", include_buffers)


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, by name."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    left_out: set[str] = set()
    if remove_non_persistent:
        inner = module.named_modules() if recurse else [("", module)]
        left_out = {f"{at}.{name}".lstrip(".") for at, each in inner for name in each._non_persistent_buffers_set}
    yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def dtype_byte_size(dtype: Any) -> float:
    """Bytes of one element; bools are counted as bits, as accelerate does."""
    if dtype == torch.bool:
        return 1 / 8
    return dtype.itemsize if isinstance(dtype, torch.dtype) else _HALVES[str(getattr(dtype, "value", dtype))]


def compute_module_sizes(
    model: nn.Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None, buffers_only: bool = False
) -> dict[str, int]:
    """Bytes of each module and tensor by name, "" being the whole; `dtype` caps the bytes of floating elements."""
    sizes: dict[str, int] = defaultdict(int)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    found = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in found:
        each = dtype_byte_size(tensor.dtype)
        if special_dtypes and name in special_dtypes:
            each = dtype_byte_size(special_dtypes[name])
        elif wanted is not None and tensor.is_floating_point():
            each = min(each, dtype_byte_size(wanted))
        parts = name.split(".")
        for end in range(len(parts) + 1):
            sizes[".".join(parts[:end])] += int(tensor.numel() * each)
    return sizes


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes of a size such as "10GB"."""
    return parse_size(size)


def convert_bytes(size: float) -> str:
    """A size in the unit that suits it."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} TB"


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """Free bytes of each accelerator and of the host; or the sizes given, accelerators first.

    Args:
        max_memory: device -> bytes, or a text such as "10GB", which becomes a number in this dictionary too, as under
            accelerate: callers read it afterwards.
    """
    if max_memory is not None:
        for device, size in max_memory.items():
            max_memory[device] = parse_size(size) if isinstance(size, str) else size
        accelerators = sorted(device for device in max_memory if isinstance(device, int))
        others = [device for device in ("mps", "cpu", "disk") if device in max_memory]
        return {device: max_memory[device] for device in (*accelerators, *others)}
    found: dict[Any, int] = {}
    if torch.accelerator.is_available():
        for index in range(torch.accelerator.device_count()):
            found[index] = torch.accelerator.get_memory_info(index)[0]
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(line for line in file if line.startswith("MemAvailable"))
    return found | {"cpu": int(free.split()[1]) * 1024}


def get_max_layer_size(
    modules: list[tuple[str, nn.Module]], module_sizes: Mapping[str, int], no_split_module_classes: list[str]
) -> tuple[int, list[str]]:
    """Bytes of the largest module that must stay whole, and the names of those of that size."""
    largest = 0
    names: list[str] = []
    todo = list(modules)
    while todo:
        name, module = todo.pop(0)
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in (no_split_module_classes or ()):
            todo = [(f"{name}.{each}", child) for each, child in children] + todo
            continue
        if module_sizes[name] > largest:
            largest, names = module_sizes[name], [name]
        elif module_sizes[name] == largest:
            names.append(name)
    return largest, names


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Gives a module's name to its parts where all of them lie on one device; changed in place."""
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    if len({device_map[name] for name in inside}) == 1 and len(inside) > 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
    depth = 0 if module_name == "" else len(module_name.split("."))
    for child in {
        ".".join(name.split(".")[: depth + 1]) for name in device_map if name.startswith(prefix) and name != module_name
    }:
        if child != module_name:
            clean_device_map(device_map, child)
    return device_map


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Groups of names that stand for one parameter."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Lets each group of names stand for its first parameter that holds values."""
    for group in tied_params:
        found = [model.get_parameter(name) for name in group]
        shared = next((parameter for parameter in found if not parameter.is_meta), found[0])
        for name in group:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, shared)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What two tensors share where they share their memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def set_module_tensor_to_device(
    module: nn.Module, tensor_name: str, device: Any, value: torch.Tensor | None = None, dtype: Any = None, **_: Any
) -> None:
    """Moves a parameter or buffer, or puts `value` there."""
    owner_name, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(owner_name)
    old = getattr(owner, name)
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ValueError(f"{tensor_name} has no values yet (it is on meta), so `value` must be given for {device}.")
    if value is not None and dtype is None and old.is_floating_point():
        dtype = old.dtype
    moved = (old if value is None else value).to(device, dtype)
    if isinstance(old, nn.Parameter):
        moved = nn.Parameter(moved.detach(), requires_grad=old.requires_grad)
    setattr(owner, name, moved)


def load_state_dict(checkpoint_file: str, device_map: Any = None) -> dict[str, torch.Tensor]:
    """Tensors of one file of weights, on the CPU."""
    return read_tensors(checkpoint_file)


def load_checkpoint_in_model(
    model: nn.Module, checkpoint: Any, device_map: Any = None, *, strict: bool = False, **options: Any
) -> None:
    """Reads weights into a model that lies on one device."""
    if device_map and len(set(device_map.values())) > 1:
        refuse(
            "load_checkpoint_in_model(device_map=...)",
            "models are not spread over devices by a map",
            "native: `paceline.Accelerator(plan={'shard': 4})`, or load the model on one device",
        )
    load_model(model, checkpoint, strict=strict)


def is_compiled_module(module: Any) -> bool:
    """Whether `torch.compile` made it."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether a part of it was compiled."""
    return any(is_compiled_module(each) for each in module.modules())


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The module inside DDP (and, on request, without mixed precision and `torch.compile`)."""
    compiled = model if is_compiled_module(model) else None
    inner = model._orig_mod if compiled is not None else model
    while isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel) or _is_engine(inner):
        inner = inner.module
    if not keep_fp32_wrapper:
        unwrap_forward(inner)
    if compiled is not None and keep_torch_compile and inner is compiled._orig_mod:
        return compiled
    return inner


def _is_engine(model: Any) -> bool:
    """Whether a model is an engine of DeepSpeed's: its module lies inside, as in DDP."""
    engines = sys.modules.get("paceline.compat.deepspeed.engine")  # loaded, if there is an engine
    return engines is not None and isinstance(model, engines.DeepSpeedEngine)
