"""`infer_auto_device_map` decides by bytes alone which part of a model goes to which device; also checks of a map.

The parts are tried in the order of their definition; a block that must stay whole is one part. A part
      fits the device with the parts tied to it     -> is placed there
      does not fit, but has parts of its own        -> is replaced by them
      does not fit                                  -> is tried on the next device; earlier devices are never tried again

Main devices (the first accelerator, and the host) keep room for the largest part that is still to come, because an
offloaded part is moved there for its forward.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.base import env as environment
from paceline.base.errors import PlanError
from paceline.plan.fqn import nearest, parent, within
from paceline_accelerate.module_sizes import (
    Dtype,
    Memory,
    NamedModules,
    Part,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_bytes,
    convert_file_size_to_int,
    direct_parts,
    get_max_layer_size,
    get_max_memory,
    get_module_size_with_ties,
    log,
)
from paceline_accelerate.module_tensors import Device, find_tied_parameters

DeviceMap = dict[str, Any]


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMap:
    """Gives each part of a model a device: accelerators first, then the host, then the disk.

    Args:
        model: its tensors may be on meta.
        max_memory: device -> bytes, or a text such as "10GB"; None is the free memory.
        no_split_module_classes: names of classes that stay on one device.
        dtype: dtype that the weights will be loaded in; it is an upper limit for the bytes of each element.
        special_dtypes: name of a tensor -> dtype that it will be loaded in.
        verbose: whether each step is printed.
        clean_result: whether a module is named in place of its parts if all of them are on one device.
        offload_buffers: whether buffers of offloaded parts will be offloaded too, and need no room on an accelerator.
        fallback_allocation: whether any later part is tried if the next one does not fit an empty device.

    Returns:
        Name of a module or tensor -> number of an accelerator, "mps", "cpu" or "disk".
    """
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    allocation = _Allocation(model, get_max_memory(max_memory), _as_list(no_split_module_classes), sizes, verbose)
    allocation.run(fallback_allocation)
    if not offload_buffers:
        _warn_of_buffers(allocation, dtype, special_dtypes)
    _report_unused(allocation)
    if clean_result:
        return clean_device_map(allocation.device_map)
    return allocation.device_map


class _Allocation:
    """Places the parts of a model on devices, once.

    Args:
        model: gives the parts and the ties between them.
        max_memory: device -> bytes, in the order in which devices are filled.
        whole_classes: names of classes that stay on one device.
        sizes: name -> bytes.
        verbose: prints each step.

    Attributes:
        device_map: the result.
        placed: name -> part, of those in the result.
        used: device -> bytes.
        needed: device that could take no further part -> bytes that the part would have needed there.
        free: device on which a part did not fit -> bytes that parts could still have taken there.
    """

    def __init__(
        self, model: nn.Module, max_memory: Memory, whole_classes: list[str], sizes: Mapping[str, int], verbose: bool
    ) -> None:
        self.max_memory = max_memory
        self.sizes = sizes
        self.devices: list[Device] = list(max_memory)
        if "disk" not in self.devices:
            self.devices.append("disk")
        self.accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        # Where offloaded parts compute: the first accelerator, and the host for what is on the disk.
        self._main_devices = self.accelerators[:1]
        if "mps" in self.accelerators:
            self._main_devices = ["mps"]
        self._main_devices.append("cpu")
        self._whole_classes = whole_classes
        self._is_verbose = verbose
        self._tied_groups = find_tied_parameters(model)
        if not self._tied_groups and check_tied_parameters_in_config(model):
            log.warning("The model's weights are not tied. Call its `tie_weights` before `infer_auto_device_map`.")
        self.device_map: DeviceMap = OrderedDict()
        self.placed: dict[str, Part] = {}
        self.used: dict[Device, int] = dict.fromkeys(self.devices, 0)
        self.needed: dict[Device, int] = {}
        self.free: dict[Device, float] = {}
        self._position = 0
        self._remaining = direct_parts(model)
        # Here single tensors of the model itself count as parts; later calls (`_find_largest_layers`) pass modules alone.
        self._largest_layer, self._largest_names = get_max_layer_size(self._remaining, sizes, whole_classes)

    def run(self, fallback_allocation: bool) -> None:
        """Places every part."""
        while self._remaining:
            name, part = self._remaining.pop(0)
            self._forget_layer(name)
            self._say(f"\nPart {name}.")
            if self._place(name, part):
                continue
            if self._divide(name, part):
                continue
            device = self.devices[self._position]
            # It is tried again: on the next device, or here after a later part that fits.
            self._remaining.insert(0, (name, part))
            # The search for another part keeps room for the skipped one again, and accelerate's warning does not.
            self.free[device] = self._free(device)
            if fallback_allocation and self._may_skip() and self._take_any(device):
                continue
            self._say(f"{name} does not fit {device}: on to the next device.")
            size, _, _ = self._size_with_ties(name)
            self.needed[device] = size + self._reserved(device)
            self._position += 1

    def _say(self, text: str) -> None:
        if self._is_verbose:
            print(text)

    def _free(self, device: Device) -> float:
        """Returns the bytes that parts may still take on a device."""
        if device == "disk":
            return float("inf")
        free: float = self.max_memory[device] - self._reserved(device) - self.used[device]
        return free

    def _reserved(self, device: Device) -> int:
        """Returns the bytes that stay free on a device for the largest part that may be moved there."""
        if device in self._main_devices:
            return self._largest_layer
        return 0

    def _size_with_ties(self, name: str) -> tuple[int, list[str], list[Part]]:
        """Returns the bytes of a part together with the parts tied to it, and the names and modules of those."""
        tied = _tied_elsewhere(name, self._tied_groups)
        return get_module_size_with_ties(tied, self.sizes[name], self.sizes, self._remaining)

    def _place(self, name: str, part: Part) -> bool:
        """Puts a part and those tied to it on the current device if they fit; returns whether they did."""
        device = self.devices[self._position]
        size, tied_names, tied_parts = self._size_with_ties(name)
        if size > self._free(device):
            return False
        self._say(f"{name} and {tied_names} ({size} bytes) go to {device}.")
        self.used[device] += size
        self.device_map[name] = device
        self.placed[name] = part
        for tied_name, tied_part in zip(tied_names, tied_parts, strict=True):
            self.device_map[tied_name] = device
            self.placed[tied_name] = tied_part
        self._remaining = [(other, module) for other, module in self._remaining if other not in tied_names]
        return True

    def _divide(self, name: str, part: Part) -> bool:
        """Replaces a part by its own parts; returns whether there was anything to divide.

        If the part itself fits and only the parts tied to it do not, the first of those that can be divided is divided.
        """
        device = self.devices[self._position]
        _, tied_names, tied_parts = self._size_with_ties(name)
        # Nothing is tied to it, or it is too large even without what is tied to it.
        if not tied_names or self.sizes[name] > self._free(device):
            inner_parts = _parts_of(name, part, self._whole_classes)
            if not inner_parts:
                return False
            self._remaining[:0] = inner_parts
            self._find_largest_layers()
            return True
        for tied_name, tied_part in zip(tied_names, tied_parts, strict=True):
            inner_parts = _parts_of(tied_name, tied_part, self._whole_classes)
            if not inner_parts:
                continue
            self._say(f"{name} fits {device} and {tied_name}, which is tied to it, does not: divided.")
            remaining_names = [other for other, _ in self._remaining]
            place = remaining_names.index(tied_name)
            self._remaining[place : place + 1] = inner_parts
            # The part is tried again: now only the piece that is really tied to it has to fit too.
            self._remaining.insert(0, (name, part))
            self._find_largest_layers()
            return True
        return False

    def _may_skip(self) -> bool:
        """Whether later parts may be placed before the next one, which is so only while a main device is empty."""
        device = self.devices[self._position]
        return device in self._main_devices and self.used[device] == 0

    def _take_any(self, device: Device) -> bool:
        """Moves the first part, at any depth, that fits a device to the front; returns whether there is one."""
        # The part that is skipped now is placed later and may be the largest, so room is kept for it again. As at the
        # start, single tensors count as parts.
        self._largest_layer, self._largest_names = get_max_layer_size(self._remaining, self.sizes, self._whole_classes)
        limit = self._free(device)
        if limit < 0:  # the room that is kept for the largest part is more than the device has
            return False
        name, part, other_parts = fallback_allocate(
            self._remaining, self.sizes, int(limit), self._whole_classes, self._tied_groups
        )
        if name is None:
            return False
        self._say(f"{name} is the first part that fits {device}.")
        self._remaining = [(name, part), *other_parts]
        return True

    def _find_largest_layers(self) -> None:
        """Finds the largest parts among those that are not placed yet."""
        modules: NamedModules = [(name, part) for name, part in self._remaining if isinstance(part, nn.Module)]
        self._largest_layer, self._largest_names = get_max_layer_size(modules, self.sizes, self._whole_classes)

    def _forget_layer(self, name: str) -> None:
        """Removes a part from the largest ones that are still to come, and finds the next largest if none is left."""
        self._largest_names = [layer for layer in self._largest_names if not within(layer, name)]
        if not self._largest_names:
            self._find_largest_layers()


def _as_list(classes: str | Sequence[str] | None) -> list[str]:
    if isinstance(classes, str):
        return [classes]
    return list(classes or ())


def _parts_of(name: str, part: Part, whole_classes: Sequence[str]) -> NamedModules:
    """Lists the parts of a module under their full names; the list is empty if the module must stay whole."""
    if isinstance(part, Tensor) or type(part).__name__ in whole_classes:
        return []
    if not list(part.children()):
        return []
    return [(f"{name}.{inner_name}", inner) for inner_name, inner in direct_parts(part)]


def _tied_elsewhere(name: str, tied_groups: Iterable[Sequence[str]]) -> list[str]:
    """Lists the names outside of a part that share a parameter with a name inside it."""
    elsewhere: list[str] = []
    for group in tied_groups:
        outside = [parameter for parameter in group if not within(parameter, name)]
        # A group that is wholly outside has nothing to do with the part.
        if len(outside) < len(group):
            elsewhere += outside
    return elsewhere


def fallback_allocate(
    modules: NamedModules,
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Sequence[str] | None = None,
    tied_parameters: Sequence[Sequence[str]] | None = None,
) -> tuple[str | None, Any, NamedModules]:
    """Finds the first part that fits a size; the inner parts of one that does not fit are tried before the next part.

    Args:
        modules: parts by name.
        module_sizes: name -> bytes.
        size_limit: bytes, or a text such as "10GB".
        no_split_module_classes: names of classes that are not looked into.
        tied_parameters: groups of names that stand for one parameter; parts that share it have to fit too.

    Returns:
        The name, the part, and the other parts; if the part was inside others, their remaining parts take their places. If
        nothing fits, it returns None, None and `modules`.
    """
    limit = convert_file_size_to_int(size_limit)
    whole_classes = _as_list(no_split_module_classes)
    # A stack: the inner parts of a part are put on top, in reverse, so that they are tried first and in their order.
    remaining = list(reversed(modules))
    while remaining:
        name, part = remaining.pop()
        tied = _tied_elsewhere(name, tied_parameters or ())
        size, _, _ = get_module_size_with_ties(tied, module_sizes[name], module_sizes, remaining)
        if size <= limit:
            return name, part, _without(modules, name)
        remaining += reversed(_parts_of(name, part, whole_classes))
    return None, None, modules


def _without(modules: NamedModules, wanted: str) -> NamedModules:
    """Returns the parts without one that may be at any depth; a part that contains it is replaced by its other parts."""
    others: NamedModules = []
    for name, part in modules:
        if name == wanted:
            continue
        if within(wanted, name):
            others += _without(_parts_of(name, part, ()), wanted)
        else:
            others.append((name, part))
    return others


def clean_device_map(device_map: DeviceMap, module_name: str = "") -> DeviceMap:
    """Replaces the entries of a module's parts by one of the module if all are on one device; changes the map in place."""
    prefix = ""  # of the whole model's parts
    if module_name:
        prefix = f"{module_name}."
    inside = [name for name in device_map if name.startswith(prefix)]
    devices = {str(device_map[name]) for name in inside}  # as text, because a map may say 0 and "0" for one device
    if len(devices) == 1 and len(inside) > 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
    # The same is done for each direct child that the map still names, or whose parts it names.
    children: dict[str, None] = {}
    for name in device_map:
        if name.startswith(prefix) and name != module_name:
            child_name = name[len(prefix) :].partition(".")[0]
            children[prefix + child_name] = None
    for child in children:
        clean_device_map(device_map, child)
    return device_map


def _warn_of_buffers(allocation: _Allocation, dtype: Dtype | None, special: Mapping[str, Dtype] | None) -> None:
    """Warns if no accelerator has room for the buffers of offloaded parts, which stay on the main device."""
    offloaded = 0
    for name, part in allocation.placed.items():
        if allocation.device_map[name] not in ("cpu", "disk"):
            continue
        if isinstance(part, nn.Module):
            offloaded += compute_module_total_buffer_size(part, dtype, special)
        elif not isinstance(part, nn.Parameter):
            offloaded += allocation.sizes[name]
    if not offloaded or not allocation.accelerators:
        return
    # A layer that is computed needs room beside the buffers, which `free` leaves out.
    free = [allocation.free.get(device, 0) for device in allocation.accelerators]
    if max(free) < offloaded:
        warnings.warn(
            f"The offloaded parts have {offloaded} bytes of buffers, which stay on an accelerator, and none has room for "
            "them. Use offload_buffers=True where memory runs out.",
            stacklevel=3,
        )


def _report_unused(allocation: _Allocation) -> None:
    """Logs which devices stayed empty, and how many bytes the next part would have needed there."""
    lines = []
    for device, size in allocation.needed.items():
        if not allocation.used[device]:
            lines.append(f"  {device}: {convert_bytes(size)} for the next part")
    if lines:
        log.info("These devices are too small for any part of the model:\n%s", "\n".join(lines))


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the config of a transformers model says that its weights are tied."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        return False
    has_embeddings = model.get_output_embeddings() is not None  # type: ignore[operator]
    ties_embeddings = bool(getattr(config, "tie_word_embeddings", False)) and has_embeddings
    is_composed = bool(getattr(config, "is_encoder_decoder", False))
    ties_encoder = is_composed and bool(getattr(config, "tie_encoder_decoder", False))
    return ties_embeddings or ties_encoder or hasattr(model, "_tie_weights")


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: DeviceMap) -> None:
    """Warns if the names of one parameter are on several devices."""
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        distinct = set(map(str, devices.values()))  # as text, because a map may say 0 and "0" for one device
        if len(distinct) > 1:
            log.warning("Names of one tied parameter are on several devices: %s. Put them on one.", devices)


def device_of(name: str, device_map: DeviceMap) -> Any:
    """Returns the device of a parameter, which is that of the innermost module around it that the map names.

    Raises:
        PlanError: `device-map-incomplete`, if the map names none.
    """
    key = nearest(name, device_map)
    if key is None:
        # A tensor of the model itself is in no submodule.
        holder = parent(name) or name
        raise PlanError(
            "device-map-incomplete",
            f"the device map gives {name} no device.",
            why=f"it names {_first_names(device_map)}",
            fix=f"add to it: {holder!r}: 'cpu'",
        )
    return device_map[key]


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Checks that a map covers all tensors of a model, and warns about names that the model does not have.

    Raises:
        PlanError: `device-map-incomplete`, with the bytes that have no device.
    """
    tensors = dict(named_tensors(model))
    module_names = {name for name, _ in model.named_modules()}
    unknown = [name for name in device_map if name not in module_names and name not in tensors]
    if unknown:
        warnings.warn(f"The device map names modules that the model does not have: {unknown}", stacklevel=2)
    missing = {name: tensor.nbytes for name, tensor in tensors.items() if nearest(name, device_map) is None}
    if missing:
        raise incomplete(missing, device_map)


def incomplete(missing: Mapping[str, int], device_map: DeviceMap) -> PlanError:
    """Makes the error for tensors (name -> bytes) to which a map gives no device."""
    num_bytes = sum(missing.values())
    shown = ", ".join(list(missing)[:8])
    if len(missing) > 8:
        shown += ", ..."
    entries: dict[str, None] = {}  # in order, and each once
    for name in missing:
        # A tensor of the model itself is in no submodule, so its own name has to be in the map.
        holder = parent(name) or name
        entries[f"{holder!r}: 'cpu'"] = None
    return PlanError(
        "device-map-incomplete",
        f"the device_map does not give any device for the following parameters: {shown}.",
        why=f"they are {len(missing)}, with {convert_bytes(num_bytes)}; the map names {_first_names(device_map)}",
        fix="add to it: " + ", ".join(list(entries)[:8]),
    )


def _first_names(device_map: DeviceMap) -> str:
    """Lists what a map names, for an error; of a large model it would fill pages."""
    return ", ".join(map(repr, list(device_map)[:8])) or "nothing"


def without_folder(model: nn.Module, device_map: DeviceMap) -> PlanError:
    """Makes the error for a map that sends modules to the disk when no folder was given."""
    names = [name for name, device in device_map.items() if device == "disk"]
    sizes = compute_module_sizes(model)
    why = []
    for name in names:
        num_bytes = sizes.get(name, 0)  # a map may name modules that the model does not have
        why.append(f"the device map says 'disk' for {name!r}, which has {convert_bytes(num_bytes)}")
    return PlanError(
        "offload-folder",
        f"these submodules need to be offloaded to the disk, and neither `offload_dir` nor `offload_folder` was given: "
        f"{', '.join(map(repr, names[:8]))}.",
        why=why,
        fix="add offload_dir='offload' (offload_folder= in load_checkpoint_and_dispatch and from_pretrained), or a "
        "larger max_memory",
    )


def check_alone(num_processes: int) -> None:
    """Checks that a model that is spread over devices is prepared by a single process.

    Raises:
        PlanError: `device-map-ranks`.
    """
    allowed = environment.snapshot().get("ACCELERATE_BYPASS_DEVICE_MAP", "false").lower() == "true"
    if num_processes > 1 and not allowed:
        raise PlanError(
            "device-map-ranks",
            "a model that a device map spreads over devices cannot be prepared by several processes.",
            why=f"there are {num_processes} processes, and each would use all of the map's devices",
            fix="run it with --num_processes 1, or load it without device_map= and let the plan divide it",
        )


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Lists the tensors of a state dict; with `keep_vars` they are the model's own and not detached copies."""
    return list(model.state_dict(keep_vars=True).items())
