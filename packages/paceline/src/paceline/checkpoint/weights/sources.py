"""`Weights` are whole tensors in files, by name; any box of a tensor can be read without the rest of it.

model.safetensors, *.index.json    safetensors: a box is a slice of the mapped file
pytorch_model.bin, weights.pt      torch's format: mapped, unpickled without running code
.metadata and *.distcp             torch's distributed format: the shards that overlap
"""

from __future__ import annotations

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

from paceline.base.errors import CheckpointError
from paceline.checkpoint.files import reading
from paceline.checkpoint.format.shards import INDEX, read_index, tensor_of
from paceline.checkpoint.store import Store, confined
from paceline.torch_internals.checkpoint import file_view
from paceline.world.parts import Part, regions

Box = tuple[slice, ...]
KINDS = (("model", "safetensors"), ("pytorch_model", "bin"))
SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
# The keys under which scripts usually save a model's state in a file that contains more.
_INSIDE = ("state_dict", "model_state_dict", "model", "module")


@dataclass(frozen=True)
class WeightEntry:
    """The description of a whole tensor.

    Attributes:
        name: its name in the model.
        shape: its shape.
        dtype: its dtype in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """The size of dim 0; it is 1 for a 0-dim tensor, and 0 for an empty one."""
        if not self.nbytes:
            return 0
        return self.shape[0] if self.shape else 1


class Weights(Protocol):
    """Whole tensors in files."""

    @property
    def entries(self) -> Mapping[str, WeightEntry]:
        """Shapes and dtypes of the tensors, by name."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a box of one tensor to the CPU, and nothing else."""
        ...


def fill(target: Tensor, part: Part, weights: Weights, name: str) -> None:
    """Copies the part of a saved tensor that belongs to this rank into the rank's own tensor."""
    for box_of_whole, box_of_own in regions(part):
        target[box_of_own].copy_(weights.read(name, box_of_whole))


def read_whole(weights: Weights, name: str) -> Tensor:
    """Reads one whole tensor to the CPU."""
    return weights.read(name, tuple(slice(0, size) for size in weights.entries[name].shape))


class SafeWeights:
    """Files in the safetensors format.

    Args:
        paths: files whose tensors make one model.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.entries: dict[str, WeightEntry] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            with reading(path):
                file = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(name)
                    dtype_name = tensor.get_dtype()
                    if dtype_name not in SAFETENSORS_DTYPES:
                        raise ValueError(f"it holds numbers of type {dtype_name}, which torch does not know")
                    self.entries[name] = WeightEntry(name, tuple(tensor.get_shape()), SAFETENSORS_DTYPES[dtype_name])
                    self._files[name] = file

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a box of one tensor."""
        # The box of a 0-dim tensor is empty.
        if not box:
            return cast(Tensor, self._files[name].get_tensor(name))
        return cast(Tensor, self._files[name].get_slice(name)[box])


class TensorWeights:
    """Tensors that are in memory already, or memory-mapped.

    Args:
        tensors: the tensors, by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.entries = {name: WeightEntry(name, tuple(t.shape), t.dtype) for name, t in self._tensors.items()}

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a box of one tensor."""
        return self._tensors[name][box]


def torch_weights(paths: Sequence[str]) -> TensorWeights:
    """Opens files of `torch.save` whose tensors make one model. They are mapped: only what is read takes memory."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= _state_in(load_mapped(path), path)
    return TensorWeights(tensors)


def load_mapped(path: str) -> Any:
    """Loads a file of `torch.save` without running code from it; tensors are read when they are accessed.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    with reading(path):
        with open(path, "rb") as file:
            zipped = file.read(2) == b"PK"  # torch's format since 1.6; files in the older format cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)


def _state_in(content: object, path: str) -> dict[str, Tensor]:
    """Finds the tensors of a model in the contents of a file: all of it, or what is under one of the usual keys."""
    what = f"a {type(content).__qualname__}"
    if isinstance(content, Mapping):
        what += f" with {', '.join(map(str, content))}"
        nested_states = [content[key] for key in _INSIDE if key in content]
        for state in (content, *nested_states):
            if isinstance(state, Mapping) and state and all(isinstance(value, Tensor) for value in state.values()):
                return {str(name): value for name, value in state.items()}
    raise CheckpointError(
        "checkpoint-damaged",
        f"the file {path} holds no dictionary of tensors.",
        why=f"it holds {what[:300]}; looked at all of it and under {', '.join(_INSIDE)}",
        fix="name a file of weights",
    )


class DividedWeights:
    """A folder in the format of torch's distributed checkpoint, written by Paceline, another library or torch itself.

    The shards of the tensor that was read last stay in memory, since its next rows are likely to be read next.

    Args:
        store, folder: the place of the checkpoint.
        prefix: only tensors whose names begin with it are included, under names without it.
        index: torch's index of the folder, if the caller has read it already.
    """

    def __init__(self, store: Store, folder: str, prefix: str = "", index: Metadata | None = None) -> None:
        self._store = store
        self._folder = folder
        self._prefix = prefix
        self._index = index or read_index(store, folder)
        self._last_read = ""
        self._shards: dict[tuple[int, ...], Tensor] = {}
        self.entries: dict[str, WeightEntry] = {}
        for full_name, saved in self._index.state_dict_metadata.items():
            if full_name.startswith(prefix) and isinstance(saved, TensorStorageMetadata):
                name = full_name.removeprefix(prefix)
                self.entries[name] = WeightEntry(name, tuple(saved.size), saved.properties.dtype)

    @property
    def paths(self) -> dict[str, tuple[Any, ...]]:
        """The path of each entry in the nested state that was saved, as torch's planner recorded it."""
        paths = self._index.planner_data
        if not isinstance(paths, dict):
            return {}
        return {str(name): tuple(path) for name, path in paths.items()}

    @cached_property
    def _places(self) -> dict[str, dict[tuple[int, ...], Any]]:
        """The place of each shard in its file, by name and offset."""
        places: dict[str, dict[tuple[int, ...], Any]] = {}
        for shard, info in self._index.storage_data.items():
            places.setdefault(shard.fqn, {})[tuple(shard.offset or ())] = info
        return places

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a box of one tensor, which it assembles from the shards that overlap with it."""
        saved = cast(TensorStorageMetadata, self._index.state_dict_metadata[self._prefix + name])
        if not saved.size:
            return self._shard(name, ())
        whole = torch.empty([run.stop - run.start for run in box], dtype=saved.properties.dtype, device="cpu")
        for chunk in saved.chunks:
            of_shard: list[slice] = []
            of_box: list[slice] = []
            for run, offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True):
                low = max(run.start, offset)
                high = min(run.stop, offset + size)
                of_shard.append(slice(low - offset, high - offset))
                of_box.append(slice(low - run.start, high - run.start))
            # A shard outside of the box has an empty overlap in some dim, and is not read.
            if all(run.start < run.stop for run in of_shard):
                whole[tuple(of_box)] = self._shard(name, tuple(chunk.offsets))[tuple(of_shard)]
        return whole

    def _shard(self, name: str, offset: tuple[int, ...]) -> Tensor:
        if self._last_read != name:
            self._last_read = name
            self._shards = {}
        if offset not in self._shards:
            self._shards[offset] = self._load(self._places[self._prefix + name][offset])
        return self._shards[offset]

    def objects(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of everything that is not a tensor, read without running code."""
        for full_name, shards in self._places.items():
            name = full_name.removeprefix(self._prefix)
            if full_name.startswith(self._prefix) and name not in self.entries:
                (info,) = shards.values()
                yield name, self._load(info)

    def _load(self, info: Any) -> Any:
        source = self._store.join(self._folder, INDEX)
        path = confined(self._store, self._folder, info.relative_path, source)
        with self._store.open(path, "rb") as file:
            return tensor_of(file_view(file, info.offset, info.length), info.relative_path)


def is_part(name: str) -> bool:
    """Returns whether a file has the name of weights, in one file or in several, or of their index."""
    return any(
        re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.{ending}(\.index\.json)?", name) is not None for stem, ending in KINDS
    )
