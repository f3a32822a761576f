"""`Weights`: whole tensors by name that lie in files, of which any box is read without the rest.

model.safetensors, *.index.json    safetensors: a box is a slice of the mapped file
pytorch_model.bin, weights.pt      torch's format: mapped, unpickled without running code
.metadata and *.distcp             torch's distributed format: the shards that overlap
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from paceline.base.errors import CheckpointError
from paceline.checkpoint.files import is_safetensors, reading
from paceline.checkpoint.manifest import NAME, Manifest, verify
from paceline.checkpoint.shards import INDEX, read_index, tensor_of
from paceline.checkpoint.store import Store, store_for
from paceline.world.parts import Part, regions

Box = tuple[slice, ...]
_KINDS = (("model", "safetensors"), ("pytorch_model", "bin"))
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
# Under these keys scripts keep a model's state in a file that holds more.
_INSIDE = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class Entry:
    """A whole tensor, said in plain numbers.

    Attributes:
        name: as in its model.
        shape: of the whole.
        dtype: as it is kept.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Size of dim 0; 1 of a 0-dim tensor, 0 of an empty one."""
        return (self.shape[0] if self.shape else 1) if self.nbytes else 0


class Weights(Protocol):
    """Whole tensors in files."""

    entries: Mapping[str, Entry]

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor, on the CPU; nothing else is read."""
        ...


def fill(target: Tensor, part: Part, weights: Weights, name: str) -> None:
    """Copies into a rank's own tensor the part of a saved one that it is."""
    for there, here in regions(part):
        target[here].copy_(weights.read(name, there))


class SafeWeights:
    """Files in the safetensors format.

    Args:
        paths: files whose tensors make one model.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.entries: dict[str, Entry] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            with reading(path):
                file = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118
                    kept = file.get_slice(name)
                    self.entries[name] = Entry(name, tuple(kept.get_shape()), _dtype(kept.get_dtype()))
                    self._files[name] = file

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor."""
        if not box:
            return cast(Tensor, self._files[name].get_tensor(name))
        return cast(Tensor, self._files[name].get_slice(name)[box])


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"it holds numbers of type {name}, which torch does not know")
    return _DTYPES[name]


class TensorWeights:
    """Tensors that are in memory already, or mapped.

    Args:
        tensors: by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.entries = {name: Entry(name, tuple(t.shape), t.dtype) for name, t in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor."""
        return self._tensors[name][box]


def torch_weights(paths: Sequence[str]) -> TensorWeights:
    """Files of `torch.save` whose tensors make one model, mapped: memory is taken by what is read."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= _state_in(load_mapped(path), path)
    return TensorWeights(tensors)


def load_mapped(path: str) -> Any:
    """What a file of `torch.save` holds, without running code; tensors are read when they are looked at.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    with reading(path):
        with open(path, "rb") as file:
            zipped = file.read(2) == b"PK"  # torch's format since 1.6; an older one cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)


def _state_in(found: Any, path: str) -> dict[str, Tensor]:
    """The tensors of a model in what a file holds: all of it, or what lies under one of the usual keys."""
    inner = [found, *(found[key] for key in _INSIDE if key in found)] if isinstance(found, Mapping) else []
    for each in inner:
        if isinstance(each, Mapping) and each and all(isinstance(value, Tensor) for value in each.values()):
            return {str(name): value for name, value in each.items()}
    what = f"a {type(found).__qualname__}" + (f" with {', '.join(map(str, found))}" if inner else "")
    raise CheckpointError(
        "checkpoint-damaged",
        f"the file {path} holds no dictionary of tensors.",
        why=f"it holds {what[:300]}; looked at all of it and under {', '.join(_INSIDE)}",
        fix="name a file of weights",
    )


class DividedWeights:
    """A folder in the format of torch's distributed checkpoint: ours, accelerate's, torch's own.

    Of the tensor that was read last the shards stay in memory, since its next rows are likely to be asked for.

    Args:
        store, folder: where it lies.
        prefix: of the names that are wanted; it is left out of them.
    """

    def __init__(self, store: Store, folder: str, prefix: str = "", index: Metadata | None = None) -> None:
        self._store, self._folder, self._prefix = store, folder, prefix
        self._index = index or read_index(store, folder)
        self._kept: tuple[str, dict[Any, Tensor]] = ("", {})
        self.entries = {
            name.removeprefix(prefix): Entry(name.removeprefix(prefix), tuple(kept.size), kept.properties.dtype)
            for name, kept in self._index.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(kept, TensorStorageMetadata)
        }

    @property
    def paths(self) -> dict[str, tuple[Any, ...]]:
        """Where each entry stood in the nested state that was saved, as torch's planner wrote it down."""
        told = self._index.planner_data
        return {str(name): tuple(path) for name, path in told.items()} if isinstance(told, dict) else {}

    @cached_property
    def _places(self) -> dict[str, dict[tuple[int, ...], Any]]:
        found: dict[str, dict[tuple[int, ...], Any]] = {}
        for place, info in self._index.storage_data.items():
            found.setdefault(place.fqn, {})[tuple(place.offset or ())] = info
        return found

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor, put together from the shards that overlap it."""
        kept = cast(TensorStorageMetadata, self._index.state_dict_metadata[self._prefix + name])
        if not kept.size:
            return self._shard(name, ())
        found = torch.empty([each.stop - each.start for each in box], dtype=kept.properties.dtype, device="cpu")
        for chunk in kept.chunks:
            lows = [max(each.start, offset) for each, offset in zip(box, chunk.offsets, strict=True)]
            highs = [
                min(each.stop, offset + size)
                for each, offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(low < high for low, high in zip(lows, highs, strict=True)):
                there = tuple(slice(a - o, b - o) for a, b, o in zip(lows, highs, chunk.offsets, strict=True))
                here = tuple(slice(a - e.start, b - e.start) for a, b, e in zip(lows, highs, box, strict=True))
                found[here] = self._shard(name, tuple(chunk.offsets))[there]
        return found

    def _shard(self, name: str, offset: tuple[int, ...]) -> Tensor:
        if self._kept[0] != name:
            self._kept = (name, {})
        if offset not in self._kept[1]:
            info = self._places[self._prefix + name][offset]
            with self._store.open(self._store.join(self._folder, info.relative_path), "rb") as file:
                view = _create_file_view(cast(Any, file), info.offset, info.length)
                self._kept[1][offset] = tensor_of(view, info.relative_path)
        return self._kept[1][offset]

    def objects(self) -> Iterator[tuple[str, Any]]:
        """What is no tensor: name and value, read without running code."""
        for name, infos in self._places.items():
            if name.startswith(self._prefix) and name.removeprefix(self._prefix) not in self.entries:
                (info,) = infos.values()
                with self._store.open(self._store.join(self._folder, info.relative_path), "rb") as file:
                    view = _create_file_view(cast(Any, file), info.offset, info.length)
                    yield name.removeprefix(self._prefix), tensor_of(view, info.relative_path)


def open_weights(path: str | os.PathLike[str], model: str = "") -> Weights:
    """The weights in a file or folder, whatever their format.

    Args:
        path: a folder (of safetensors or torch's files, one of our checkpoints, one of accelerate's or DeepSpeed's, one of
            torch's distributed format, or one whose file `latest` names such a folder in it), or one file of weights.
        model: in a checkpoint of several models, the name of the one that is wanted: "model", "model_1", ...

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    from paceline.checkpoint.deepspeed import DeepSpeedFolder, is_deepspeed, newest  # which is made of what is here

    store = store_for(path)
    place = newest(store.resolve(os.fspath(path)))
    if store.exists(store.join(place, NAME)):
        return _checkpointed(store, place, model)
    if is_deepspeed(place):
        return DeepSpeedFolder(place).weights
    if store.exists(store.join(place, INDEX)):
        return _divided(store, place)
    number = int(model.rpartition("_")[2]) if re.fullmatch(r"model_\d+", model) else 0
    inner = store.join(place, f"pytorch_model_fsdp_{number}")
    if store.exists(store.join(inner, INDEX)):
        return _divided(store, inner)
    end = f"_{number}" if number else ""
    named = [f"{stem}{end}.{ending}" for stem, ending in (*_KINDS, ("pytorch_model_fsdp", "bin"))]
    found = [store.join(place, name) for name in named if os.path.exists(store.join(place, name))]
    paths = found[:1] or parts_of(place)
    return SafeWeights(paths) if all(map(_holds_safetensors, paths)) else torch_weights(paths)


def _checkpointed(store: Store, home: str, model: str) -> Weights:
    """One model of a checkpoint of ours, whose files are there in full length."""
    manifest = Manifest.read(store, home)
    problems = verify(home, store, names=(), manifest=manifest)
    if problems:
        raise CheckpointError.of(problems)
    place = manifest.place(store, home)
    index = read_index(store, place)
    models = sorted({name.split("/")[1] for name in index.state_dict_metadata if name.startswith("models/")})
    chosen = model or (models[0] if len(models) == 1 else "")
    if chosen not in models:
        raise CheckpointError(
            "checkpoint-missing",
            f"the checkpoint {home} holds {len(models)} models" + (f", none of them {model}." if model else "."),
            why=f"they are called {', '.join(models)}" if models else "the run that saved it had prepared none",
            fix=f"say which: {models[0]}, for instance" if models else "name a checkpoint that holds a model",
        )
    return DividedWeights(store, place, f"models/{chosen}/", index)


def _divided(store: Store, place: str) -> Weights:
    index = read_index(store, place)
    names = [name for name, kept in index.state_dict_metadata.items() if isinstance(kept, TensorStorageMetadata)]
    told = index.planner_data if isinstance(index.planner_data, dict) else {}
    # accelerate saves {"model": state}, where another script may save a state whose names begin like this.
    nested = bool(names) and all(tuple(told.get(name, ()))[:1] == ("model",) for name in names)
    return DividedWeights(store, place, "model." if nested else "", index)


def _holds_safetensors(path: str) -> bool:
    with reading(path), open(path, "rb") as file:
        return is_safetensors(file)


def parts_of(folder: str) -> list[str]:
    """Files of a folder that hold the weights of a model, or the one file that was named.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`.
    """
    if os.path.isfile(folder):
        return [folder]
    for stem, ending in _KINDS:
        single, index = f"{stem}.{ending}", os.path.join(folder, f"{stem}.{ending}.index.json")
        if os.path.exists(os.path.join(folder, single)):
            return [os.path.join(folder, single)]
        if os.path.exists(index):
            with reading(index), open(index, "rb") as file:
                names = dict.fromkeys(json.loads(file.read())["weight_map"].values())
            return [os.path.join(folder, os.path.basename(cast(str, name))) for name in names]
    there = ", ".join(sorted(os.listdir(folder))[:8]) if os.path.isdir(folder) else "no such folder"
    raise CheckpointError(
        "checkpoint-missing",
        f"there are no weights in {folder}.",
        why=f"looked for model.safetensors and pytorch_model.bin, whole or cut; found: {there}",
        fix="name the folder that save_model wrote to",
    )


def is_part(name: str) -> bool:
    """Whether a file's name is one that weights, whole or cut, have."""
    return any(
        re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.{ending}(\.index\.json)?", name) is not None for stem, ending in _KINDS
    )
