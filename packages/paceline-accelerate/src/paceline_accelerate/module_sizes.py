"""Computes how many bytes the parts of a model need and how many a device has; a model may be on meta for it."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.base.errors import ConfigError
from paceline.plan.fqn import parent, within
from paceline_accelerate.kinds import text_of
from paceline_accelerate.module_tensors import dtype_of, is_fractional, named_module_tensors
from paceline_large.inference.memory import free_memory

# accelerate's own logger has this name, and scripts filter by it.
log = logging.getLogger("accelerate.utils.modeling")

# Numbers of accelerators, "mps", "cpu" and "disk" -> bytes, or a text such as "10GB" from scripts.
Memory = dict[Any, Any]
Dtype = str | torch.dtype | Any
Part = nn.Module | Tensor
NamedModules = list[tuple[str, Part]]

# Element types of accelerate's that are no dtypes of torch.
_BYTES_OF_OTHERS = {"fp8": 1, "int4": 0.5, "int2": 0.25}
_UNITS = {"K": 1, "M": 2, "G": 3}
_NAMED_DEVICES = ("mps", "cpu", "disk")


def dtype_byte_size(dtype: Any) -> float:
    """Returns the bytes of one element; booleans count as one bit, as under accelerate."""
    word = text_of(dtype)
    if word in _BYTES_OF_OTHERS:
        return _BYTES_OF_OTHERS[word]
    try:
        dtype = dtype_of(dtype)
    except AttributeError as error:
        raise ValueError(f"`dtype` is not a valid dtype: {dtype}.") from error
    if dtype == torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    raise ValueError(f"`dtype` is not a valid dtype: {word}.")


def convert_file_size_to_int(size: int | str) -> int:
    """Returns the bytes of a size such as 5000, "10GB" or "512MiB"; "10Gb" are gigabits.

    Raises:
        ConfigError: `size-text`.
    """
    if isinstance(size, int) and size >= 0:
        return size
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([KMG])(IB|B)\s*", str(size), re.IGNORECASE)
    if isinstance(size, str) and match is not None:
        number, unit, ending = match.groups()
        base = 1024 if ending.upper() == "IB" else 1000
        count = int(float(number) * base ** _UNITS[unit.upper()])
        are_bits = ending == "b"
        if are_bits:
            count //= 8
        return count
    raise ConfigError(
        "size-text",
        f"{size!r} is not in a valid format of a size.",
        why="a size is a whole number of bytes, or a number with KB, MB, GB, KiB, MiB or GiB",
        fix='write one such as "10GB", "512MiB" or 1000000',
    )


def convert_bytes(size: float) -> str:
    """Formats a size in the largest unit that gives a number of at least 1."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Returns the bytes of each module and tensor by name; "" is the whole model, and a tied parameter counts once.

    Args:
        model: its tensors may be on meta.
        dtype: upper limit for the bytes of floating-point elements.
        special_dtypes: name of a tensor -> dtype that counts in place of its own.
        buffers_only: whether parameters are left out.
    """
    largest_element = float("inf")
    if dtype is not None:
        largest_element = dtype_byte_size(dtype)
    special_sizes: dict[str, float] = {}
    for name, special_dtype in (special_dtypes or {}).items():
        special_sizes[name] = dtype_byte_size(special_dtype)
    if buffers_only:
        tensors = model.named_buffers()
    else:
        tensors = named_module_tensors(model, recurse=True)
    sizes: dict[str, Any] = defaultdict(int)
    for name, tensor in tensors:
        element = dtype_byte_size(tensor.dtype)
        if name in special_sizes:
            element = special_sizes[name]
        elif is_fractional(tensor.dtype):
            # Loading converts floating-point tensors alone; whole numbers keep their size.
            element = min(element, largest_element)
        size = tensor.numel() * element
        # The size counts for the model (""), for each module around the tensor, and for the tensor itself.
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Returns the bytes of all buffers of a model."""
    sizes = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
    return sizes.get("", 0)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Lists the names that contain no other name."""
    containers: set[str] = set()
    for name in module_sizes:
        while name:
            name = parent(name)
            containers.add(name)
    return [name for name in module_sizes if name and name not in containers]


def get_max_layer_size(
    modules: NamedModules, module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str] | None
) -> tuple[int, list[str]]:
    """Returns the bytes of the largest module that must stay whole, and the names of all modules of that size."""
    largest = 0
    names: list[str] = []
    # A stack, reversed: modules are visited in the order of their definition, children in the place of their module.
    remaining = list(reversed(modules))
    while remaining:
        name, module = remaining.pop()
        children = []
        if not isinstance(module, Tensor):
            children = list(module.named_children())
        may_be_split = type(module).__name__ not in (no_split_module_classes or ())
        if children and may_be_split:
            for child_name, child in reversed(children):
                remaining.append((f"{name}.{child_name}", child))
            continue
        size = module_sizes[name]
        if size > largest:
            largest = size
            names = []
        if size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Returns the bytes of a model, and those of its largest layer with the names of all layers of that size."""
    sizes = compute_module_sizes(model)
    whole_blocks = getattr(model, "_no_split_modules", None) or []
    return sizes[""], get_max_layer_size(direct_parts(model), sizes, whole_blocks)


def direct_parts(module: nn.Module) -> NamedModules:
    """Lists the parameters, submodules and buffers that a module itself has, by name."""
    parameters = list(module.named_parameters(recurse=False))
    buffers = list(module.named_buffers(recurse=False))
    return [*parameters, *module.named_children(), *buffers]


def get_module_size_with_ties(
    tied_params: Iterable[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: NamedModules
) -> tuple[int, list[str], list[Part]]:
    """Returns the bytes of a module together with the modules that share a parameter with it.

    Args:
        tied_params: names of these parameters, in the other modules.
        module_size: bytes of the module alone.
        module_sizes: bytes by name.
        modules_to_treat: modules that have no device yet.

    Returns:
        The bytes, and names and modules of those that have to go along.
    """
    tied_params = list(tied_params)
    names: list[str] = []
    modules: list[Part] = []
    total = module_size
    for parameter in tied_params:
        for name, module in modules_to_treat:
            if within(parameter, name):
                if name not in names:
                    names.append(name)
                    modules.append(module)
                    total += module_sizes[name]
                # The shared parameter is already part of the first module's size.
                total -= module_sizes.get(parameter, 0)
                break
    return total, names, modules


def get_max_memory(max_memory: Memory | None = None) -> Memory:
    """Returns the free bytes of each accelerator and of the host, or the given sizes, in each case accelerators first.

    Args:
        max_memory: device -> bytes, or a text such as "10GB". Texts become numbers in this very dictionary, as under
            accelerate, because callers read it afterwards.

    Raises:
        ConfigError: `size-text`, `device-name`.
    """
    if max_memory is None:
        *of_accelerators, of_host = free_memory().values()
        return {**dict(enumerate(of_accelerators)), "cpu": of_host}
    num_accelerators = 0
    if torch.accelerator.is_available():
        num_accelerators = torch.accelerator.device_count()
    for device, size in max_memory.items():
        if isinstance(size, str):
            max_memory[device] = convert_file_size_to_int(size)
    accelerators = sorted(device for device in max_memory if isinstance(device, int))
    for index in accelerators:
        if not 0 <= index < num_accelerators:
            log.warning("There is no accelerator %s on this host; there are: %s", index, list(range(num_accelerators)))
    unknown = [device for device in max_memory if device not in (*accelerators, *_NAMED_DEVICES)]
    if unknown:
        raise ConfigError(
            "device-name",
            f"max_memory names the device {unknown[0]!r}, which there is not.",
            why="devices are numbers (of accelerators, from 0), 'mps', 'cpu' and 'disk'",
            fix="write it as max_memory={0: '10GB', 'cpu': '30GB'}",
        )
    named_devices = [device for device in _NAMED_DEVICES if device in max_memory]
    return {device: max_memory[device] for device in (*accelerators, *named_devices)}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> Memory:
    """Returns limits for `infer_auto_device_map` with which each accelerator gets about the same part of the model.

    A limit is an equal share plus room for one block. The last accelerator keeps all of its memory, because the shares are
    estimates and the rest of the model has to fit somewhere.

    Args:
        model: its tensors may be on meta.
        max_memory: as in `get_max_memory`.
        no_split_module_classes: names of classes that stay on one device.
        dtype: as in `compute_module_sizes`.
        special_dtypes: as in `compute_module_sizes`.
        low_zero: whether accelerator 0 is kept as empty as the others allow, for example for text generation.
    """
    memory = get_max_memory(max_memory)
    accelerators = [device for device in memory if isinstance(device, int) and memory[device] > 0]
    if not accelerators:
        return memory
    # accelerate raises a KeyError where the caller's limits leave accelerator 0 out.
    if 0 not in memory:
        low_zero = False
    if len(accelerators) == 1:
        low_zero = False
        if max_memory is None:
            # A single accelerator also has to hold buffers and activations.
            memory[accelerators[0]] *= 0.9
            log.info("Nine tenths of the memory of device %s are for weights.", accelerators[0])
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    model_size = sizes[""]
    num_sharing = len(accelerators)
    if low_zero:
        num_sharing -= 1  # accelerator 0 takes only what the others have no room for
    share = model_size // num_sharing + _room_for_a_block(model, sizes, no_split_module_classes)
    for device in accelerators[:-1]:
        if not (low_zero and device == 0):
            memory[device] = min(share, memory[device])
    if low_zero:
        room_on_others = sum(memory[device] for device in accelerators if device != 0)
        left_over = max(0, model_size - room_on_others)
        memory[0] = min(left_over, memory[0])
    return memory


def _room_for_a_block(model: nn.Module, sizes: Mapping[str, int], whole: str | Sequence[str] | None) -> int:
    """Returns the bytes of the largest block that stays whole, or of a mean layer if that is more; plus a quarter."""
    whole_classes = list(whole or ())
    if isinstance(whole, str):
        whole_classes = [whole]
    class_of = {name: type(module).__name__ for name, module in model.named_modules()}
    # The whole model is no block, also if its blocks have its class.
    del class_of[""]
    block_sizes: dict[str, int] = {}
    for name, size in sizes.items():
        # Blocks of one class are assumed to have one size, so the first one counts for all.
        if class_of.get(name) in whole_classes:
            block_sizes.setdefault(class_of[name], size)
    # The leaves of all names are the tensors. Without them, the leaves are the layers.
    tensors = set(get_module_leaves(sizes))
    module_sizes = {name: size for name, size in sizes.items() if name not in tensors}
    layers = get_module_leaves(module_sizes)
    total = sum(module_sizes[name] for name in layers)
    mean_layer = int(total / max(len(layers), 1))
    return int(1.25 * max([mean_layer, *block_sizes.values()]))
