"""Weights from files into a model that may lie on several devices, or on none yet.

load_checkpoint_in_model
  files     one, or those of an index
  each      device_map None     -> model.load_state_dict
            "disk"              -> written to the offload folder; the model's tensor is on meta
            "cpu", for a while  -> the same in a temporary folder, until all files have been read
            other               -> onto the device
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint.files import is_safetensors, read_tensors, reading
from paceline.compat.absent import refuse
from paceline.compat.accelerate.device_map import (
    DeviceMap,
    check_tied_parameters_on_same_device,
    covers,
    device_of,
    incomplete,
    without_folder,
)
from paceline.compat.accelerate.errors import CheckpointValueError
from paceline.compat.accelerate.module_tensors import (
    dtype_of,
    find_tied_parameters,
    is_fractional,
    retie_parameters,
    set_module_tensor_to_device,
)
from paceline.compat.accelerate.offload import (
    Index,
    Path,
    load_offloaded_weights,
    make_offload_folder,
    missing_file,
    offload_weight,
    remove_offloaded,
    save_offload_index,
    share_offloaded_weight,
)

_WHOLE = ("model.safetensors", "pytorch_model.bin")


def load_state_dict(checkpoint_file: Path, device_map: DeviceMap | None = None) -> dict[str, Tensor]:
    """Tensors of one file of weights.

    Args:
        checkpoint_file: safetensors, or torch's format, which is read without running code from it.
        device_map: lets tensors of a safetensors file go straight to their devices; else all are on the CPU.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    path = os.fspath(checkpoint_file)
    with reading(path), open(path, "rb") as file:
        is_safe = is_safetensors(file)
    if not is_safe or not device_map:
        return read_tensors(path)
    tensors = {}
    with reading(path), safe_open(path, framework="pt", device="cpu") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no mapping
            device = _nearest(name, device_map)
            if device in (None, "disk"):
                device = "cpu"
            tensors[name] = weights.get_tensor(name).to(device)
    return tensors


def _nearest(name: str, device_map: DeviceMap) -> Any:
    """The device of the nearest module around a tensor that the map names; None where it names none."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Path,
    device_map: DeviceMap | None = None,
    offload_folder: Path | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Reads weights into a model, file by file.

    Args:
        model: on meta, or with weights.
        checkpoint: a file of weights, an index (`*.index.json`), or a folder with one of either.
        device_map: name of a module -> device; None leaves each tensor where it is.
        offload_folder: for modules on "disk".
        dtype: of the weights; None is that of the model.
        offload_state_dict: keeps weights for the CPU in files until all have been read: whole files of weights then
            need not fit beside them.
        offload_buffers: buffers of modules on "disk" are written there too.
        keep_in_fp32_modules: parts of names of weights that stay float32 under another `dtype`.
        offload_8bit_bnb: 8-bit weights, which are not carried.
        strict: names that the model does not have, or that the files do not have, are an error.
        full_state_dict: has no effect: files hold whole tensors.
        broadcast_from_rank0: not carried.

    Ranks: whoever calls; no communication.

    Raises:
        PlanError: `offload-folder`, `device-map-incomplete`.
        CheckpointError: `checkpoint-path`, `checkpoint-names` (under `strict`), `checkpoint-missing`, `checkpoint-damaged`,
            `checkpoint-unsafe`, `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`.
        RuntimeError: tensors of another shape, without a map; with one, ValueError.
    """
    if broadcast_from_rank0:
        refuse("broadcast_from_rank0", "each rank reads the files itself", "leave it out")
    if offload_8bit_bnb:
        refuse("offload_8bit_bnb", "8-bit weights are not carried", "load the model unquantised")
    on_disk = device_map is not None and "disk" in device_map.values()
    if device_map is not None and on_disk and offload_folder is None:
        raise without_folder(model, device_map)
    files = checkpoint_files(checkpoint)
    tied_groups = find_tied_parameters(model)
    if device_map is not None:
        check_tied_parameters_on_same_device(tied_groups, device_map)
    if offload_folder is not None and on_disk:
        make_offload_folder(offload_folder)
    names_in_files: set[str] = set()
    keep_in_fp32 = keep_in_fp32_modules or ()
    with ExitStack() as stack:
        waiting_folder: str | None = None
        if offload_state_dict and device_map is not None:
            waiting_folder = stack.enter_context(tempfile.TemporaryDirectory())
        placement = _Placement(model, device_map, offload_folder, waiting_folder, dtype_of(dtype), offload_buffers)
        for file in files:
            tensors = load_state_dict(file, device_map)
            names_in_files.update(tensors)
            if device_map is None:
                _load_in_place(model, tensors, placement.dtype, keep_in_fp32)
                continue
            placement.check(tensors)
            # What is written or brought to its device is let go at once.
            for name in list(tensors):
                placement.put(name, tensors.pop(name), keep_in_fp32)
        placement.finish(tied_groups)
    retie_parameters(model, tied_groups)
    if strict:
        error = CheckpointError if device_map is None else CheckpointValueError
        _check_names(model, names_in_files, error)


class _Placement:
    """Where tensors of files go, by a device map.

    Args:
        model: which gets them.
        device_map: name of a module -> device.
        offload_folder: of modules on "disk".
        waiting_folder: where those for the CPU wait; None puts them there at once.
        dtype: of the weights; None is that of the model.
        offload_buffers: buffers of modules on "disk" are written there too.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: DeviceMap | None,
        offload_folder: Path | None,
        waiting_folder: str | None,
        dtype: torch.dtype | None,
        offload_buffers: bool,
    ) -> None:
        self.dtype = dtype
        self._model = model
        self._device_map = device_map or {}
        self._offload_folder = offload_folder
        self._waiting_folder = waiting_folder
        self._offload_buffers = offload_buffers
        self._names = set(model.state_dict())
        self._buffers = {name for name, _ in model.named_buffers()}
        self._offloaded: Index = {}
        self._waiting: Index = {}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises where the map gives some of a file's tensors no device, before any is placed."""
        missing: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name in self._names and not covers(self._device_map, name):
                missing[name] = tensor
        if missing:
            raise incomplete(missing, self._device_map)

    def put(self, name: str, tensor: Tensor, keep_in_fp32: Sequence[str]) -> None:
        """Puts one tensor where it belongs; names that the model does not have are passed over."""
        if name not in self._names:
            return
        device = device_of(name, self._device_map)
        dtype = _dtype_for(name, tensor, self.dtype, keep_in_fp32)
        goes_to_disk = device == "disk" and (self._offload_buffers or name not in self._buffers)
        if goes_to_disk:
            assert self._offload_folder is not None, "checked before"
            try:
                self._write(name, tensor, dtype, self._offload_folder, self._offloaded)
            except CheckpointError:
                remove_offloaded(self._offloaded, self._offload_folder)
                raise
        elif device == "cpu" and self._waiting_folder is not None:
            self._write(name, tensor, dtype, self._waiting_folder, self._waiting)
        else:
            target = "cpu" if device == "disk" else device
            set_module_tensor_to_device(self._model, name, target, value=tensor, dtype=dtype)

    def _write(self, name: str, tensor: Tensor, dtype: torch.dtype | None, folder: Path, index: Index) -> None:
        """Writes a tensor into a folder and its index; the model's own is on meta from then on."""
        expected = self._model.state_dict(keep_vars=True)[name]
        if expected.shape != tensor.shape:
            raise ValueError(
                f"{name} has the shape {expected.shape} in the model, and a tensor of shape {tensor.shape} in the checkpoint: "
                "it belongs to another model."
            )
        if dtype is None:
            are_fractional = is_fractional(expected.dtype) and is_fractional(tensor.dtype)
            dtype = expected.dtype if are_fractional else tensor.dtype
        set_module_tensor_to_device(self._model, name, "meta", dtype=dtype)
        offload_weight(tensor.to(dtype), name, folder, index)

    def finish(self, tied_groups: Sequence[Sequence[str]]) -> None:
        """Writes the index, and brings what has waited to the CPU.

        Args:
            tied_groups: names that share one parameter; files of weights may hold it under one of them alone.
        """
        if self._offload_folder is not None:
            for group in tied_groups:
                on_disk = [name for name in group if device_of(name, self._device_map) == "disk"]
                share_offloaded_weight(on_disk, self._offload_folder, self._offloaded)
            save_offload_index(self._offloaded, self._offload_folder)
        if self._waiting_folder is not None:
            load_offloaded_weights(self._model, self._waiting, self._waiting_folder)


def _dtype_for(name: str, tensor: Tensor, dtype: torch.dtype | None, keep_in_fp32: Sequence[str]) -> torch.dtype | None:
    """The dtype that a tensor gets where `dtype` is asked for; None where it keeps its own."""
    if dtype is None or not is_fractional(tensor.dtype):
        return None
    if dtype in (torch.float16, torch.bfloat16) and any(f"{part}." in name for part in keep_in_fp32):
        return torch.float32
    return dtype


def _load_in_place(
    model: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, keep_in_fp32: Sequence[str]
) -> None:
    """Reads a file's tensors into a model that keeps its devices."""
    names = set(model.state_dict())
    for name, tensor in tensors.items():
        new_dtype = _dtype_for(name, tensor, dtype, keep_in_fp32)
        if name in names and new_dtype is not None:
            device = model.state_dict(keep_vars=True)[name].device
            set_module_tensor_to_device(model, name, device, value=tensor, dtype=new_dtype)
    on_meta = any(tensor.is_meta for tensor in model.state_dict().values())
    model.load_state_dict(dict(tensors), strict=False, assign=on_meta)


def _check_names(model: nn.Module, names_in_files: set[str], error: type[CheckpointError]) -> None:
    """Raises where names do not match; names of one tied parameter stand for each other."""
    names_in_model = set(model.state_dict())
    missing_names = names_in_model - names_in_files
    for group in find_tied_parameters(model):
        if names_in_files.intersection(group):
            missing_names.difference_update(group)
    missing = sorted(missing_names)
    unexpected = sorted(names_in_files - names_in_model)
    why = []
    if missing:
        why.append(f"it does not have {missing[:8]}")
    if unexpected:
        why.append(f"the model does not have {unexpected[:8]}")
    if why:
        what = f"the checkpoint does not match {type(model).__name__}."
        fix = "load the checkpoint of this model, or leave out strict=True"
        raise error.of([Problem("checkpoint-names", what, why=why, fix=fix)])


def checkpoint_files(checkpoint: Path) -> list[str]:
    """The files of weights that a path stands for.

    Raises:
        CheckpointError: `checkpoint-path`, a ValueError too; `checkpoint-missing`; `checkpoint-damaged`.
    """
    path = os.fspath(checkpoint)
    if os.path.isfile(path):
        return _files_of_index(path) if path.endswith(".json") else [path]
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    whole = [name for name in _WHOLE if name in names]
    indexes = [name for name in names if name.endswith(".index.json")]
    if whole:
        return [os.path.join(path, whole[0])]
    if len(indexes) == 1:
        return _files_of_index(os.path.join(path, indexes[0]))
    what = f"{path} names several checkpoints." if indexes else f"{path} is no checkpoint."
    why = "it is neither a file nor a folder"
    if os.path.isdir(path):
        why = f"it is a folder that holds {', '.join(names[:8]) or 'nothing'}"
    fix = "name one file: weights, or the *.index.json of weights in several files"
    raise CheckpointValueError.of([Problem("checkpoint-path", what, why=why, fix=fix)])


def _files_of_index(path: str) -> list[str]:
    """The files of weights that an index names.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`.
    """
    with reading(path), open(path, encoding="utf-8") as file:
        content = json.load(file)
        table = content.get("weight_map", content)
        names = list(dict.fromkeys(table.values()))
    files = [os.path.join(os.path.dirname(path), str(name)) for name in names]
    for file_path in files:
        if not os.path.isfile(file_path):
            raise missing_file(file_path, f"{path} says that weights are in it")
    return files
