"""Tensors on disk in the format of torch's distributed checkpoint: planned by torch, written through a `Store`.

torch's own reader unpickles the index and every object without limits, its writer knows no checksum, and a failure
of one rank reaches the others only after a collective of its own. So the planners are torch's, the files are in its
format (`torch.distributed.checkpoint.load` reads them), and the reading and writing are here.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.manifest import Checksummed, FileFact
from paceline.checkpoint.format.share import envelope, raw
from paceline.checkpoint.store import Store
from paceline.torch_internals.checkpoint import INDEX_GLOBALS, file_view

INDEX = ".metadata"


class SavePlanner(DefaultSavePlanner):
    """Divides the tensors that several ranks have in common among these ranks, by size.

    Args:
        tensors: the tensors of this rank, by path.
        pinned: the paths of tensors that may differ between ranks, such as buffers; the lowest rank that has one writes it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], pinned: Sequence[str]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pinned = pinned
        self.set_up_planner(dict(tensors), StorageMeta(), is_coordinator=False)

    def create_local_plan(self) -> SavePlan:
        """Returns what this rank could write, with its pinned paths for `create_global_plan`."""
        return replace(super().create_local_plan(), planner_data=tuple(self._pinned))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Returns what each rank writes; the result is the same on every rank that gets the same plans."""
        owner: dict[str, int] = {}
        for rank, plan in enumerate(all_plans):
            for path in plan.planner_data:
                owner.setdefault(path, rank)
        plans = []
        for rank, plan in enumerate(all_plans):
            # A pinned tensor stays in the plan of its owner only. torch then divides the others among the ranks that have
            # them.
            items = [item for item in plan.items if owner.get(item.index.fqn, rank) == rank]
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)


def write_shard(store: Store, folder: str, name: str, pieces: Iterable[Any]) -> dict[str, FileFact]:
    """Writes one rank's file, and returns its entry in the manifest."""
    with store.open(store.join(folder, name), "wb") as file:
        stream = Checksummed(file)
        for piece in pieces:
            stream.write(piece)
    return {name: stream.fact}


def write_index(store: Store, folder: str, index: Metadata, results: Iterable[WriteResult]) -> FileFact:
    """Writes `.metadata`, as torch's writer does."""
    index.storage_data = {result.index: result.storage_data for result in results}
    index.storage_meta = StorageMeta()
    index.version = filesystem.CURRENT_DCP_VERSION
    with store.open(store.join(folder, INDEX), "wb") as file:
        stream = Checksummed(file)
        pickle.dump(index, cast(Any, stream))
    return stream.fact


class _IndexReader(pickle.Unpickler):
    """Unpickles only the classes of an index: the file may come from anybody, and a pickle can call any function."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class that torch's index consists of, or a dtype."""
        if (module, name) in INDEX_GLOBALS:
            # An index that was written under Python 3.13 is read under others, too.
            if module == "pathlib._local":
                module = "pathlib"
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            "checkpoint-unsafe",
            f"the checkpoint's index asks for {module}.{name}, which an index never needs.",
            why="reading it would run code from the file",
            fix="do not use this checkpoint, and find out who changed it",
        )


def read_index(store: Store, folder: str) -> Metadata:
    """Reads `.metadata` without running code from it.

    Raises:
        CheckpointError: `checkpoint-unsafe`, `checkpoint-damaged`.
    """
    path = store.join(folder, INDEX)
    with store.open(path, "rb") as file:
        content = file.read()
    try:
        index = _IndexReader(io.BytesIO(content)).load()
        if not isinstance(index, Metadata):
            raise TypeError(f"it holds a {type(index).__name__}")
        return index
    except CheckpointError:
        raise
    except Exception as error:  # damaged bytes can make an unpickler raise any exception, and all mean the same
        raise CheckpointError(
            "checkpoint-damaged",
            f"the index {path} cannot be read.",
            why=f"{type(error).__name__}: {error}",
            fix="load another checkpoint; this file was cut or edited",
        ) from None


def tensor_of(view: Any, name: str) -> Tensor:
    """Loads the tensor, or the plain values, in a part of a file, without running code from it.

    Args:
        view: a file object of that part, as `torch.save` wrote it.
        name: the name of the file, for an error.

    Raises:
        CheckpointError: `checkpoint-unsafe`, `checkpoint-damaged`.
    """
    try:
        return cast(Tensor, torch.load(view, map_location="cpu", weights_only=True))
    except (EOFError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "checkpoint-damaged",
            f"{name} cannot be read where a tensor should be.",
            why=f"{type(error).__name__}: {error}",
            fix="load another checkpoint, or copy this file again from an intact copy",
        ) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "checkpoint-unsafe",
            f"{name} holds more than a tensor where a tensor should be.",
            why=str(error).split("\n", maxsplit=1)[0],
            fix="do not use this checkpoint, and find out who changed it",
        ) from None


def shapes(index: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Returns the shape and dtype of each tensor."""
    return {
        path: (entry.size, entry.properties.dtype)
        for path, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_shards(
    store: Store, folder: str, index: Metadata, files: Mapping[str, FileFact], into: dict[str, Any]
) -> None:
    """Reads a checkpoint into tensors, whole or sharded.

    Args:
        store, folder: the checkpoint.
        index: its index.
        files: its files; the index must not name any other.
        into: tensors by path, each with the global shape that the index has.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(into, index)
    by_file = defaultdict(list)
    for item in planner.create_local_plan().items:
        by_file[index.storage_data[item.storage_index].relative_path].append(item)
    scratch = _Scratch()
    for name, wanted in by_file.items():
        if name not in files:
            raise CheckpointError(
                "checkpoint-unsafe",
                f"the checkpoint's index points to {name!r}, which its manifest does not list.",
                why="a checkpoint may only name its own files",
                fix="do not use this checkpoint, and find out who changed it",
            )
        with store.open(store.join(folder, name), "rb") as file:
            # In the order of their offsets, so that the file is read forwards.
            for item in sorted(wanted, key=lambda item: index.storage_data[item.storage_index].offset):
                info = index.storage_data[item.storage_index]
                saved = _SavedTensor(file, info, index.state_dict_metadata[item.storage_index.fqn], item)
                saved.read(planner.resolve_tensor(item).detach(), scratch)


class _SavedTensor:
    """One tensor, or a part of one, in an open file, and the region of it that an item of torch's plan asks for."""

    def __init__(self, file: BinaryIO, info: Any, entry: Any, item: ReadItem) -> None:
        self._file = file
        self._name: str = info.relative_path
        self._start: int = info.offset
        self._length: int = info.length
        self._shape: torch.Size = entry.chunks[item.storage_index.index].sizes
        self._dtype: torch.dtype = entry.properties.dtype
        self._offsets = item.storage_offsets
        self._lengths = item.lengths

    def read(self, target: Tensor, scratch: _Scratch) -> None:
        """Reads the region into `target`, directly into its memory if it has the same layout there as in the file."""
        start = self._first_byte()
        if start is None:
            saved = tensor_of(file_view(self._file, self._start, self._length), self._name)
            target.copy_(_box(saved, self._offsets, self._lengths))
            return
        if not target.numel():
            return
        # The rows of the region are contiguous in the file. The region may have only some of their columns, so that whole
        # rows are read and then cut.
        rows = self._shape
        if self._shape:
            rows = torch.Size([self._lengths[0], *self._shape[1:]])
            start += self._offsets[0] * self._shape[1:].numel() * self._dtype.itemsize
        self._file.seek(start)
        in_place = target.dtype == self._dtype and target.device.type == "cpu" and target.is_contiguous()
        if in_place and rows == self._lengths:
            self._read_into(raw(target))
            return
        part = scratch.tensor(rows, self._dtype)
        self._read_into(raw(part))
        columns = [0, *self._offsets[1:]] if self._shape else []
        target.copy_(_box(part, columns, self._lengths))

    def _first_byte(self) -> int | None:
        """Returns the offset of the tensor's bytes; None if another version of torch wrote them, and torch must read them."""
        size = self._shape.numel() * self._dtype.itemsize
        if size > self._length:
            return None
        around = envelope(self._dtype, tuple(self._shape))
        if self._length != len(around.head) + size + len(around.tail):
            return None
        self._file.seek(self._start)
        if self._file.read(len(around.head)) != around.head:
            return None
        return self._start + len(around.head)

    def _read_into(self, view: memoryview) -> None:
        while view:
            count = cast(Any, self._file).readinto(view)
            if not count:
                raise EOFError(f"{self._name} ended early: it was cut after it had been verified")
            view = view[count:]


def _box(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    runs = [slice(start, start + length) for start, length in zip(offsets, lengths, strict=True)]
    return tensor[tuple(runs)]


class _Scratch:
    """Memory for tensors that cannot be read in place. It is reused, and as large as the largest of them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Returns a tensor in this memory, which the next call overwrites."""
        size = shape.numel() * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(shape)
