"""`accelerate.utils.offload`: keeps weights in a folder, one file each, and reads them when a forward pass needs them.

    FOLDER/NAME.dat      the values as they lie in memory
    FOLDER/index.json    {NAME: {"dtype": "float32", "shape": [4, 3]}}

An entry of an index may name a tensor of a safetensors file instead: {"safetensors_file", "weight_name", "dtype"}.
accelerate can read folders that were written here, and its folders can be read here.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from paceline.base.errors import CheckpointError, PacelineError, Problem
from paceline.checkpoint.agree import os_problem
from paceline.checkpoint.files import reading, writing
from paceline.plan.fqn import within
from paceline.torch_internals.tensors import times_written
from paceline_accelerate.errors import MissingFile
from paceline_accelerate.module_tensors import Device, dtype_of, set_module_tensor_to_device

Path = str | os.PathLike[str]
Index = dict[str, dict[str, Any]]

# numpy has no bfloat16 and no float8: such weights are stored as integers of the same width, under the name of their dtype.
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16}


def offload_weight(weight: Tensor, weight_name: str, offload_folder: Path, index: Index | None = None) -> Index | None:
    """Writes one weight to a folder, and notes it in `index`.

    Returns:
        `index`.

    Raises:
        CheckpointError: `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`.
    """
    stored, dtype_name = _as_stored(weight.detach().cpu().contiguous())
    if index is not None:
        index[weight_name] = {"dtype": dtype_name, "shape": list(weight.shape)}
    path = os.path.join(offload_folder, f"{weight_name}.dat")
    # The file is written and not mapped, because writing to a mapped file on a full disk kills the process without an error.
    doing = f"offloading {weight_name} ({weight.nbytes} bytes)"
    with _writing_to(offload_folder, doing), _draft_of(path) as draft, open(draft, "wb") as file:
        file.write(stored.reshape(-1).view(numpy.uint8).data)
    return index


@contextmanager
def _draft_of(path: str) -> Iterator[str]:
    """Gives the name of a file to write, which then takes the place of `path`.

    An earlier file is replaced and not overwritten, because a model of this process, or of another rank that offloads to
    the same folder, may still have it mapped.
    """
    draft = f"{path}.{secrets.token_hex(4)}"
    try:
        yield draft
        os.replace(draft, path)
    finally:
        # It is still there after an error, and where it is a second link to the file that it replaces.
        with suppress(FileNotFoundError):
            os.remove(draft)


@contextmanager
def _writing_to(offload_folder: Path, doing: str) -> Iterator[None]:
    """Turns errors of the operating system into checkpoint errors whose fix is about offloading, not about checkpoints."""
    try:
        yield
    except OSError as error:
        # The file's name is left out of the message, because the user chose only the folder.
        refused = OSError(error.errno, error.strerror)
        problem = os_problem(refused, f"{doing} to {offload_folder}")
        fix = (
            "name another folder (offload_dir=; offload_folder= in from_pretrained), or keep more of the model in "
            "memory (a larger max_memory=)"
        )
        raise CheckpointError.of([replace(problem, fix=fix)]) from error


def share_offloaded_weight(names: Sequence[str], offload_folder: Path, index: Index) -> None:
    """Gives all names of one parameter the file that one of them has: forwards look each up by its own name.

    Raises:
        CheckpointError: `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`.
    """
    written = [name for name in names if name in index]
    if not written:
        return
    source = os.path.join(offload_folder, f"{written[0]}.dat")
    for name in names:
        if name in index:
            continue
        path = os.path.join(offload_folder, f"{name}.dat")
        with _writing_to(offload_folder, f"offloading {name}"), _draft_of(path) as draft:
            try:
                os.link(source, draft)
            except OSError:
                # Some file systems do not support hard links.
                shutil.copyfile(source, draft)
        index[name] = index[written[0]]


def _as_stored(tensor: Tensor) -> tuple[numpy.ndarray[Any, Any], str]:
    """Returns a tensor as a numpy array, and the name of its dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype == torch.bfloat16 or name.startswith("float8"):
        return tensor.view(_SAME_WIDTH[tensor.element_size()]).numpy(), name
    array = tensor.numpy()
    return array, str(array.dtype)


def load_offloaded_weight(weight_file: Path, weight_info: Mapping[str, Any]) -> Tensor:
    """Reads one weight.

    Args:
        weight_file: its `.dat` file.
        weight_info: its entry in the index: "dtype" and "shape".

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`.
    """
    # The result is a copy in memory, because the file may be in a temporary folder that is about to be removed.
    return _mapped(weight_file, weight_info).clone()


def _mapped(weight_file: Path, weight_info: Mapping[str, Any]) -> Tensor:
    """Maps one weight into memory without copying it; changes to the tensor do not reach the file."""
    path = os.fspath(weight_file)
    shape = tuple(weight_info["shape"])
    dtype = dtype_of(weight_info["dtype"])
    num_bytes = dtype.itemsize
    for length in shape:
        num_bytes *= length
    if not os.path.exists(path):
        raise missing_file(path, f"the index says that a weight of {num_bytes} bytes is in it")
    if os.path.getsize(path) != num_bytes:
        raise CheckpointError(
            "checkpoint-damaged",
            f"the offloaded weight {path} has {os.path.getsize(path)} bytes and not {num_bytes}.",
            why=f"the index says {weight_info['dtype']} of the shape {list(shape)}; was the disk full when it was written?",
            fix="empty the offload folder and load the model again",
        )
    if num_bytes == 0:  # an empty file cannot be mapped
        return torch.empty(shape, dtype=dtype)
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    # `_MappedFile` reads the tensor's version counter, and a tensor that is made in inference mode has none.
    with torch.inference_mode(False):
        return torch.frombuffer(pages, dtype=dtype).reshape(shape)


class _MappedFile:
    """A file of weights that stays mapped between forward passes, so that on a CPU nothing is copied.

    Args:
        path: path of the file.
        read: returns the mapped weight of a name.
    """

    def __init__(self, path: str, read: Callable[[str], Tensor]) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._read = read
        self._weights: dict[str, Tensor] = {}

    def is_outdated(self, name: str) -> bool:
        """Whether the file was replaced, or a forward pass has changed the weight in place.

        Such a change lasts for one forward pass, as it would if the file were read each time.
        """
        return self._stamp != _stamp(self._path) or times_written(self.get(name)) > 0

    def get(self, name: str) -> Tensor:
        """Returns one weight; each call returns the same tensor."""
        if name not in self._weights:
            self._weights[name] = self._read(name)
        return self._weights[name]


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Returns values that differ when a file was replaced or changed; None where there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def missing_file(path: str, why: str) -> PacelineError:
    """Returns the error for a file that is missing although an index names it."""
    problem = Problem(
        "checkpoint-missing", f"there is no file {path}.", why, "copy the file there, or load the model again"
    )
    return MissingFile.of([problem])


def save_offload_index(index: Index | None, offload_folder: Path) -> None:
    """Adds the entries of an index to the folder's `index.json`, which may exist already."""
    if not index:
        return
    path = os.path.join(offload_folder, "index.json")
    # Another model, or another part of this one, may have been offloaded to the folder before.
    entries: Index = {}
    if os.path.isfile(path):
        entries = _read_index(path)
    entries.update(index)
    with writing(f"saving {path}"), _draft_of(path) as draft, open(draft, "w", encoding="utf-8") as file:
        json.dump(entries, file, indent=2)


def _read_index(path: str) -> Index:
    if not os.path.exists(path):
        raise missing_file(path, "a folder of offloaded weights has one")
    with reading(path), open(path, encoding="utf-8") as file:
        index: Index = json.load(file)
    return index


def remove_offloaded(index: Index, folder: Path) -> None:
    """Removes the files that were written before an error.

    Without an index nothing can read them, and on a full disk they take the space.
    """
    for name in index:
        with suppress(OSError):
            os.unlink(os.path.join(folder, f"{name}.dat"))


def make_offload_folder(folder: Path) -> None:
    """Creates a folder for offloaded weights if it does not exist.

    Raises:
        CheckpointError: `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`.
    """
    with _writing_to(folder, "making the folder for offloaded weights, and writing"):
        os.makedirs(folder, exist_ok=True)


def offload_state_dict(save_dir: Path, state_dict: Mapping[str, Tensor]) -> None:
    """Writes a whole state dict to a folder, with an index.

    Raises:
        CheckpointError: `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`.
    """
    make_offload_folder(save_dir)
    index: Index = {}
    try:
        for name, tensor in state_dict.items():
            offload_weight(tensor, name, save_dir, index)
    except CheckpointError:
        remove_offloaded(index, save_dir)
        raise
    save_offload_index(index, save_dir)


def load_offloaded_weights(model: nn.Module, index: Index | None, offload_folder: Path) -> None:
    """Loads the weights that an index names into a model, on the CPU."""
    for name, entry in (index or {}).items():
        weight = load_offloaded_weight(os.path.join(offload_folder, f"{name}.dat"), entry)
        set_module_tensor_to_device(model, name, "cpu", value=weight)


def extract_submodules_state_dict(
    state_dict: Mapping[str, Tensor], submodule_names: Iterable[str]
) -> dict[str, Tensor]:
    """Returns the entries of a state dict that belong to the named modules or tensors; "" names the whole model."""
    part: dict[str, Tensor] = {}
    for module_name in submodule_names:
        for name, tensor in state_dict.items():
            if within(name, module_name):
                part[name] = tensor
    return part


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Maps names to weights, which are in memory or else in files that it maps.

    Args:
        state_dict: the weights in memory.
        save_folder: folder of the `.dat` files.
        index: says which file has which weight; None reads the folder's `index.json`.
        device: device to which tensors of safetensors files are moved.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: Path | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "Offloaded weights are in a state_dict, in a save_folder or in the files of an index: give one."
            )
        if state_dict is None:
            state_dict = {}
        self.state_dict = state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = _read_index(os.path.join(save_folder, "index.json"))
        if index is None:
            index = {}
        self.index = index
        # A weight that is in memory too is taken from there (`__getitem__`), and its name is listed once.
        self.all_keys = list(self.state_dict)
        self.all_keys += [name for name in self.index if name not in self.state_dict]
        self.device = device
        self._files: dict[str, _MappedFile] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_files": {}}  # a mapping cannot be pickled, so a copy maps the files again

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        entry = self.index[key]
        if entry.get("safetensors_file") is not None:
            return self._from_safetensors(key, entry)
        if self.save_folder is None:
            raise missing_file(f"{key}.dat", "the index names it, and no folder was given")
        path = os.path.join(self.save_folder, f"{key}.dat")

        # A `.dat` file holds a single weight, so the name does not matter.
        return self._weight(path, key, lambda path: lambda name: _mapped(path, entry))

    def _weight(self, path: str, name: str, opened: Callable[[str], Callable[[str], Tensor]]) -> Tensor:
        """Returns a weight of a file, which `opened` opens if it is not mapped yet, or no longer as it was."""
        file = self._files.get(path)
        if file is None or file.is_outdated(name):
            file = self._files[path] = _MappedFile(path, opened(path))
        return file.get(name)

    def _from_safetensors(self, key: str, entry: Mapping[str, Any]) -> Tensor:
        path = str(entry["safetensors_file"])
        tensor = self._weight(path, entry.get("weight_name", key), _safetensors_reader)
        if self.device is not None:
            tensor = tensor.to(self.device)
        # The file holds the dtype that was saved, and the model may have been loaded in another.
        if "dtype" in entry:
            tensor = tensor.to(dtype_of(entry["dtype"]))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def _safetensors_reader(path: str) -> Callable[[str], Tensor]:
    """Returns a function that maps the tensors of a safetensors file without copying them."""
    if not os.path.exists(path):
        raise missing_file(path, "weights are read from it at each forward")
    # Imported here because it takes half a second.
    from paceline.checkpoint.weights.sources import SafeWeights, read_whole

    weights = SafeWeights([path])

    def read(name: str) -> Tensor:
        with torch.inference_mode(False):
            return read_whole(weights, name)

    return read


class PrefixedDataset(Mapping[str, Tensor]):
    """Looks names up in another mapping after putting a module's prefix before them.

    Iteration yields full names, as under accelerate, because peft looks them up in `dataset`.

    Args:
        dataset: mapping of full names to weights.
        prefix: prefix of the module, such as "encoder.".
    """

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self.dataset if name.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)
