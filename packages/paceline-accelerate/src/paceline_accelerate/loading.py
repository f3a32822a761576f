"""Loads weights from files into a model whose parameters may be on several devices, or still on the meta device.

load_checkpoint_in_model reads one file after the other: the file that was named, or those of an index.
  no device_map                      -> model.load_state_dict
  device "disk"                      -> the tensor is written to the offload folder; the model's own is on meta
  device "cpu" (offload_state_dict)  -> the same with a temporary folder, until all files have been read
  any other device                   -> the tensor is moved to it
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from safetensors import safe_open
from torch import Tensor, nn

from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint.files import is_safetensors, read_tensors, reading
from paceline.compat.absent import refuse
from paceline_accelerate.device_map import (
    DeviceMap,
    check_tied_parameters_on_same_device,
    covers,
    device_of,
    incomplete,
    nearest_device,
    without_folder,
)
from paceline_accelerate.errors import CheckpointOSError, CheckpointValueError, MissingFile, refused_as
from paceline_accelerate.module_sizes import log
from paceline_accelerate.module_tensors import (
    dtype_of,
    find_tied_parameters,
    is_fractional,
    retie_parameters,
    set_module_tensor_to_device,
)
from paceline_accelerate.offload import (
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
_OTHER_FORMATS = ("tf", "flax")


def load_state_dict(checkpoint_file: Path, device_map: DeviceMap | None = None) -> dict[str, Tensor]:
    """Reads the tensors of one file of weights.

    Args:
        checkpoint_file: safetensors, or torch's format, which is read without running code from it.
        device_map: sends tensors of a safetensors file straight to their devices; without it all are on the CPU.

    Raises:
        CheckpointError: `checkpoint-damaged`, `checkpoint-unsafe`.
        MissingFile: `checkpoint-missing`; it is also a `FileNotFoundError`.
        CheckpointOSError, CheckpointValueError: `checkpoint-damaged`, if the metadata of a safetensors file name another
            format than "pt".
    """
    path = os.fspath(checkpoint_file)
    with refused_as(MissingFile, "checkpoint-missing"), reading(path), open(path, "rb") as file:
        is_safe = is_safetensors(file)
    if is_safe:
        _check_format(path)
    if not is_safe or not device_map:
        return read_tensors(path)
    tensors = {}
    with reading(path), safe_open(path, framework="pt", device="cpu") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no mapping
            device = nearest_device(name, device_map)
            # Tensors for the disk are written from the CPU later, and names outside of the map are reported by the caller.
            if device in (None, "disk"):
                device = "cpu"
            tensors[name] = weights.get_tensor(name).to(device)
    return tensors


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
        offload_state_dict: whether weights for the CPU are kept in temporary files until all files have been read. The
            memory then need not hold these weights and a whole file of weights at the same time.
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
        placement = _TensorPlacement(model, device_map, offload_folder, dtype_of(dtype), keep_in_fp32, offload_buffers)
        names_in_files = placement.load(files, tied_groups, through_temporary_files=offload_state_dict)
    retie_parameters(model, tied_groups)
    if strict:
        # As under accelerate: a RuntimeError of `load_state_dict` without a map, and a ValueError with one.
        error = CheckpointError if device_map is None else CheckpointValueError
        _check_names(model, names_in_files, error)
    elif unused := sorted(names_in_files - set(model.state_dict())):
        log.warning("The model %s has no use for some weights of %s: %s", type(model).__name__, checkpoint, unused)


class _TensorPlacement:
    """Puts tensors of files where a device map says.

    Args:
        model: gets the tensors.
        device_map: name of a module -> device.
        offload_folder: folder for modules on "disk".
        dtype: dtype of the weights; None is that of the model.
        keep_in_fp32: parts of names of weights that stay float32.
        offload_buffers: whether buffers of modules on "disk" are written there too.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: DeviceMap,
        offload_folder: Path | None,
        dtype: torch.dtype | None,
        keep_in_fp32: Sequence[str],
        offload_buffers: bool,
    ) -> None:
        self._model = model
        self._device_map = device_map
        self._offload_folder = offload_folder
        self._dtype = dtype
        self._keep_in_fp32 = keep_in_fp32
        self._offload_buffers = offload_buffers
        self._names = set(model.state_dict())
        self._buffers = {name for name, _ in model.named_buffers()}
        self._offloaded: Index = {}
        self._waiting_folder: str | None = None
        self._waiting: Index = {}

    def load(
        self, files: Sequence[str], tied_groups: Sequence[Sequence[str]], through_temporary_files: bool
    ) -> set[str]:
        """Reads files one after the other, and puts their tensors where they belong.

        Args:
            files: files of weights.
            tied_groups: names that share one parameter; files may hold it under only one of them.
            through_temporary_files: whether tensors for the CPU wait in temporary files until all files have been read.

        Returns:
            All names in the files.
        """
        names_in_files: set[str] = set()
        with ExitStack() as stack:
            if through_temporary_files:
                self._waiting_folder = stack.enter_context(tempfile.TemporaryDirectory())
            for file in files:
                tensors = load_state_dict(file, self._device_map)
                names_in_files.update(tensors)
                self._check(tensors)
                # `pop` frees each tensor as soon as it is written or moved, so that the file's tensors and the model's copies
                # are not in memory together.
                for name in list(tensors):
                    self._put(name, tensors.pop(name))
            self._finish(tied_groups)
        return names_in_files

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises an error if the map gives some tensors of a file no device, before any of them is placed."""
        missing: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name in self._names and not covers(self._device_map, name):
                missing[name] = tensor
        if missing:
            raise incomplete(missing, self._device_map)

    def _put(self, name: str, tensor: Tensor) -> None:
        """Puts one tensor where it belongs; names that the model does not have are ignored."""
        if name not in self._names:
            return
        device = device_of(name, self._device_map)
        dtype = _dtype_for(name, tensor, self._dtype, self._keep_in_fp32)
        goes_to_disk = device == "disk" and (self._offload_buffers or name not in self._buffers)
        if goes_to_disk:
            assert self._offload_folder is not None, "checked before"
            try:
                self._write(name, tensor, dtype, self._offload_folder, self._offloaded)
            except CheckpointError:
                # The disk is probably full: gigabytes that no index names would stay on it.
                remove_offloaded(self._offloaded, self._offload_folder)
                raise
        elif device == "cpu" and self._waiting_folder is not None:
            self._write(name, tensor, dtype, self._waiting_folder, self._waiting)
        else:
            # A buffer of a module on "disk" that is not offloaded stays in memory.
            if device == "disk":
                device = "cpu"
            set_module_tensor_to_device(self._model, name, device, value=tensor, dtype=dtype)

    def _write(self, name: str, tensor: Tensor, dtype: torch.dtype | None, folder: Path, index: Index) -> None:
        """Writes a tensor into a folder and its index; the model's own is on meta from then on."""
        expected = self._model.state_dict(keep_vars=True)[name]
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
        set_module_tensor_to_device(self._model, name, "meta", dtype=dtype)
        offload_weight(tensor.to(dtype), name, folder, index)

    def _finish(self, tied_groups: Sequence[Sequence[str]]) -> None:
        """Writes the index of the offload folder, and loads the tensors that wait in temporary files to the CPU."""
        if self._offload_folder is not None:
            for group in tied_groups:
                on_disk = [name for name in group if device_of(name, self._device_map) == "disk"]
                share_offloaded_weight(on_disk, self._offload_folder, self._offloaded)
            save_offload_index(self._offloaded, self._offload_folder)
        if self._waiting_folder is not None:
            load_offloaded_weights(self._model, self._waiting, self._waiting_folder)


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
