"""Loads weights from files into a model whose parameters may be on several devices, or still on the meta device.

load_checkpoint_in_model reads one file after the other: the file that was named, or those of an index. Files are opened as
`paceline_large.inference` opens them: mapped, and read tensor by tensor.
  no device_map        -> model.load_state_dict
  device "disk"        -> the tensor is written to the offload folder; the model's own is on meta
  any other device     -> the tensor is copied to it
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor, nn

from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint.files import is_safetensors, reading
from paceline.plan.fqn import nearest
from paceline_accelerate.device_map import (
    DeviceMap,
    check_tied_parameters_on_same_device,
    device_of,
    incomplete,
    without_folder,
)
from paceline_accelerate.errors import CheckpointOSError, CheckpointValueError, MissingFile, refused_as
from paceline_accelerate.module_sizes import log
from paceline_accelerate.module_tensors import (
    dtype_of,
    find_tied_parameters,
    is_fractional,
    recursive_getattr,
    retie_parameters,
    set_module_tensor_to_device,
)
from paceline_accelerate.offload import (
    Index,
    Path,
    make_offload_folder,
    missing_file,
    offload_weight,
    remove_offloaded,
    save_offload_index,
    share_offloaded_weight,
)
from paceline_doors.absent import refuse

if TYPE_CHECKING:
    from paceline.checkpoint.weights.sources import Weights

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_OTHER_FORMATS = ("tf", "flax")


def load_state_dict(checkpoint_file: Path, device_map: DeviceMap | None = None) -> dict[str, Tensor]:
    """Reads the tensors of one file of weights.

    Args:
        checkpoint_file: safetensors, or torch's format, which is read without running code from it.
        device_map: sends tensors straight to their devices; without it all are on the CPU.

    Raises:
        CheckpointError: `checkpoint-damaged`, `checkpoint-unsafe`.
        MissingFile: `checkpoint-missing`; it is also a `FileNotFoundError`.
        CheckpointOSError, CheckpointValueError: `checkpoint-damaged`, if the metadata of a safetensors file name another
            format than "pt".
    """
    path = os.fspath(checkpoint_file)
    weights = _opened(path)
    tensors = {}
    for name in weights.entries:
        key = nearest(name, device_map or {})
        device = "cpu"
        # Tensors for the disk are written from the CPU later, and names outside of the map are reported by the caller.
        if device_map and key is not None and device_map[key] != "disk":
            device = device_map[key]
        tensors[name] = _mapped(weights, name, path).to(device, copy=True)
    return tensors


def _opened(path: str) -> Weights:
    """Opens one file of weights; its tensors are mapped, so that only what is read takes memory."""
    # Imported here because it takes half a second.
    from paceline.checkpoint.weights.opening import weights_in_files

    with refused_as(MissingFile, "checkpoint-missing"):
        with reading(path), open(path, "rb") as file:
            is_safe = is_safetensors(file)
        if is_safe:
            _check_format(path)
        return weights_in_files([path])


def _mapped(weights: Weights, name: str, path: str) -> Tensor:
    """Returns one tensor of a file, as a part of the mapped file: without a copy it would change with the file."""
    from paceline.checkpoint.weights.sources import read_whole

    with reading(path):
        return read_whole(weights, name)


def _check_format(path: str) -> None:
    """Refuses a safetensors file that another library than torch has written; a file without metadata is accepted."""
    with reading(path), safe_open(path, framework="pt", device="cpu") as weights:
        metadata = weights.metadata()
    if metadata is None or metadata.get("format") == "pt":
        return
    written_for = metadata.get("format")
    # The two classes are those of accelerate's errors, which scripts catch: a known other library, or no known one.
    kind: type[CheckpointError] = CheckpointOSError
    what = f"{path} does not contain the valid metadata."
    if written_for in _OTHER_FORMATS:
        kind = CheckpointValueError
        what = f"{path} was saved with {written_for}, and torch reads the pt format."
    raise kind(
        "checkpoint-damaged",
        what,
        why=f"its metadata are {metadata}; the format of tensors for torch is 'pt'",
        fix="save the weights with `save_pretrained`, or with safetensors' `save_file(..., metadata={'format': 'pt'})`",
    )


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
    """Loads weights into a model, file by file.

    Args:
        model: on meta, or with weights.
        checkpoint: a file of weights, an index (`*.index.json`), or a folder with one of either.
        device_map: name of a module -> device; None leaves each tensor where it is.
        offload_folder: for modules on "disk".
        dtype: dtype of the weights; None is that of the model.
        offload_state_dict: has no effect, because a file of weights is never in memory as a whole: it is mapped.
        offload_buffers: whether buffers of modules on "disk" are written there too.
        keep_in_fp32_modules: parts of names of weights that stay float32 when `dtype` is another one.
        offload_8bit_bnb: asks for 8-bit weights, which are refused.
        strict: whether names that only the model has, or only the files have, are an error.
        full_state_dict: has no effect, because files hold whole tensors.
        broadcast_from_rank0: is refused.

    Ranks: any rank may call it alone; it does not communicate.

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
    keep_in_fp32 = keep_in_fp32_modules or ()
    if device_map is None:
        names_in_files = _load_in_place(model, files, dtype_of(dtype), keep_in_fp32)
    else:
        names_in_files = _load_by_map(
            model, files, tied_groups, device_map, offload_folder, dtype_of(dtype), keep_in_fp32, offload_buffers
        )
    retie_parameters(model, tied_groups)
    if strict:
        # As under accelerate: a RuntimeError of `load_state_dict` without a map, and a ValueError with one.
        error = CheckpointError if device_map is None else CheckpointValueError
        _check_names(model, names_in_files, error)
    elif unused := sorted(names_in_files - set(model.state_dict())):
        log.warning("The model %s has no use for some weights of %s: %s", type(model).__name__, checkpoint, unused)


def _load_by_map(
    model: nn.Module,
    files: Sequence[str],
    tied_groups: Sequence[Sequence[str]],
    device_map: DeviceMap,
    offload_folder: Path | None,
    dtype: torch.dtype | None,
    keep_in_fp32: Sequence[str],
    offload_buffers: bool,
) -> set[str]:
    """Puts the tensors of files where a device map says, one after the other, and returns all names in the files."""
    names_in_model = set(model.state_dict())
    buffers = {name for name, _ in model.named_buffers()}
    names_in_files: set[str] = set()
    offloaded: Index = {}
    try:
        for file in files:
            weights = _opened(file)
            names_in_files.update(weights.entries)
            names = [name for name in weights.entries if name in names_in_model]
            # Before any tensor of the file is placed.
            missing = {name: weights.entries[name].nbytes for name in names if nearest(name, device_map) is None}
            if missing:
                raise incomplete(missing, device_map)
            for name in names:
                device = device_of(name, device_map)
                # A buffer of a module on "disk" that is not offloaded stays in memory.
                if device == "disk" and name in buffers and not offload_buffers:
                    device = "cpu"
                tensor = _mapped(weights, name, file)
                new_dtype = _dtype_for(name, tensor, dtype, keep_in_fp32)
                if device == "disk":
                    assert offload_folder is not None, "checked before"
                    _write(model, name, tensor, new_dtype, offload_folder, offloaded)
                else:
                    value = tensor.to(device, copy=True)
                    set_module_tensor_to_device(model, name, device, value=value, dtype=new_dtype)
        if offload_folder is not None:
            for group in tied_groups:
                on_disk = [name for name in group if device_of(name, device_map) == "disk"]
                share_offloaded_weight(on_disk, offload_folder, offloaded)
            save_offload_index(offloaded, offload_folder)
    except BaseException:
        # Gigabytes that no index names would stay on the disk, which may be full.
        if offload_folder is not None:
            remove_offloaded(offloaded, offload_folder)
        raise
    return names_in_files


def _write(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype | None, folder: Path, index: Index) -> None:
    """Writes a tensor into a folder and its index; the model's own is on meta from then on."""
    expected = recursive_getattr(model, name)
    if expected.shape != tensor.shape:
        raise ValueError(
            f"{name} has the shape {expected.shape} in the model, and a tensor of shape {tensor.shape} in the checkpoint: "
            "it belongs to another model."
        )
    if dtype is None:
        # The model's own floating-point dtype; whole numbers, such as quantised weights, are not converted.
        dtype = tensor.dtype
        if is_fractional(expected.dtype) and is_fractional(tensor.dtype):
            dtype = expected.dtype
    set_module_tensor_to_device(model, name, "meta", dtype=dtype)
    offload_weight(tensor.to(dtype), name, folder, index)


def _dtype_for(name: str, tensor: Tensor, dtype: torch.dtype | None, keep_in_fp32: Sequence[str]) -> torch.dtype | None:
    """Returns the dtype that a tensor is cast to when the caller asks for `dtype`; None where it keeps its own."""
    if dtype is None or not is_fractional(tensor.dtype):
        return None
    if dtype in (torch.float16, torch.bfloat16) and any(f"{part}." in name for part in keep_in_fp32):
        return torch.float32
    return dtype


def _load_in_place(
    model: nn.Module, files: Sequence[str], dtype: torch.dtype | None, keep_in_fp32: Sequence[str]
) -> set[str]:
    """Loads files into a model whose parameters stay on their devices, and returns all names in the files."""
    names_in_files: set[str] = set()
    for file in files:
        tensors = load_state_dict(file)
        names_in_files.update(tensors)
        names_in_model = set(model.state_dict())
        for name, tensor in tensors.items():
            # `load_state_dict` copies into the model's dtype, so parameters that change theirs are replaced first.
            new_dtype = _dtype_for(name, tensor, dtype, keep_in_fp32)
            if name in names_in_model and new_dtype is not None:
                device = model.state_dict(keep_vars=True)[name].device
                set_module_tensor_to_device(model, name, device, value=tensor, dtype=new_dtype)
        # A parameter on meta has no storage to copy into: it can only be assigned.
        on_meta = any(tensor.is_meta for tensor in model.state_dict().values())
        model.load_state_dict(tensors, strict=False, assign=on_meta)
    return names_in_files


def _check_names(model: nn.Module, names_in_files: set[str], error: type[CheckpointError]) -> None:
    """Raises an error if names do not match; any name of a tied parameter stands for its other names."""
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
    """Lists the files of weights that a path stands for.

    Raises:
        CheckpointError: `checkpoint-path`, which is also a ValueError; `checkpoint-missing`; `checkpoint-damaged`.
    """
    path = os.fspath(checkpoint)
    if os.path.isfile(path) and path.endswith(".json"):
        return _files_of_index(path)
    if os.path.isfile(path):
        return [path]
    names: list[str] = []
    why = "it is neither a file nor a folder"
    if os.path.isdir(path):
        names = sorted(os.listdir(path))
        why = f"it is a folder that holds {', '.join(names[:8]) or 'nothing'}"
    # A whole file comes before an index, and safetensors before torch's format, as under accelerate.
    for name in _WHOLE:
        if name in names:
            return [os.path.join(path, name)]
    indexes = [name for name in names if name.endswith(".index.json")]
    if len(indexes) == 1:
        return _files_of_index(os.path.join(path, indexes[0]))
    what = f"{path} is no checkpoint."
    if indexes:
        what = f"{path} names several checkpoints."
    fix = "name one file: weights, or the *.index.json of weights in several files"
    raise CheckpointValueError.of([Problem("checkpoint-path", what, why=why, fix=fix)])


def _files_of_index(path: str) -> list[str]:
    """Lists the files of weights that an index names, each of them once.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`.
    """
    with reading(path), open(path, encoding="utf-8") as file:
        content = json.load(file)
        # transformers' indexes have the table under "weight_map"; a bare table of names to files is accepted too.
        table = content.get("weight_map", content)
        names = list(dict.fromkeys(table.values()))
    files = [os.path.join(os.path.dirname(path), str(name)) for name in names]
    for file_path in files:
        if not os.path.isfile(file_path):
            raise missing_file(file_path, f"{path} says that weights are in it")
    return files
