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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from paceline.base.errors import CheckpointError
from paceline.checkpoint.manifest import Checksummed, FileFact
from paceline.checkpoint.store import Store

INDEX = ".metadata"


class SavePlanner(DefaultSavePlanner):
    """Divides the tensors that several ranks hold alike among these ranks, by size.

    Args:
        tensors: this rank's, by path.
        pinned: paths of those that may differ between ranks (buffers, say): the lowest rank that has one writes it.
    """

    def __init__(self, tensors: Mapping[str, Tensor], pinned: Sequence[str]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pinned = pinned
        self.set_up_planner(dict(tensors), StorageMeta(), is_coordinator=False)

    def create_local_plan(self) -> SavePlan:
        """What this rank could write, with its pinned paths for `create_global_plan`."""
        return replace(super().create_local_plan(), planner_data=tuple(self._pinned))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What each rank does write; the same on every rank that is given the same plans."""
        owner: dict[str, int] = {}
        for rank, plan in enumerate(all_plans):
            for path in plan.planner_data:
                owner.setdefault(path, rank)
        plans = [
            replace(plan, items=[item for item in plan.items if owner.get(item.index.fqn, rank) == rank])
            for rank, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(plans)


def write_shard(
    store: Store, folder: str, name: str, plan: SavePlan, planner: SavePlanner
) -> tuple[list[WriteResult], dict[str, FileFact]]:
    """Writes one rank's tensors into one file.

    Returns:
        Where each tensor lies, and what the manifest says of the file; nothing where the plan is empty.
    """
    if not plan.items:
        return [], {}
    results = []
    with store.open(store.join(folder, name), "wb") as file:
        stream = Checksummed(file)
        for item in plan.items:
            start = stream.bytes
            tensor = cast(Tensor, planner.resolve_data(item)).detach().cpu()
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # a view would drag its whole storage into the file
            torch.save(tensor, cast(Any, stream))
            length = stream.bytes - start
            results.append(WriteResult(item.index, length, filesystem._StorageInfo(name, start, length)))
    return results, {name: stream.fact}


def write_index(store: Store, folder: str, index: Metadata, results: Sequence[Sequence[WriteResult]]) -> FileFact:
    """Writes `.metadata`, as torch's writer does."""
    index.storage_data = {result.index: result.storage_data for part in results for result in part}
    index.storage_meta = StorageMeta()
    index.version = filesystem.CURRENT_DCP_VERSION
    with store.open(store.join(folder, INDEX), "wb") as file:
        stream = Checksummed(file)
        pickle.dump(index, cast(Any, stream))
    return stream.fact


class _IndexReader(pickle.Unpickler):
    """Unpickles an index and nothing else: the index comes from outside, and a pickle can name any function."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            (filesystem.__name__, "_StorageInfo"),
            *(
                (metadata.__name__, name)
                for name in (
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorProperties",
                    "TensorStorageMetadata",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """A class of the list above, or a dtype of torch."""
        if (module, name) in self._ALLOWED:
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
    except Exception as error:  # an unpickler fails with anything at all; each is one thing: not an index
        raise CheckpointError(
            "checkpoint-damaged",
            f"the index {path} cannot be read.",
            why=f"{type(error).__name__}: {error}",
            fix="load another checkpoint; this file was cut or edited",
        ) from None


def _tensor(view: Any, name: str) -> Tensor:
    try:
        return cast(Tensor, torch.load(view, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "checkpoint-unsafe",
            f"{name} holds more than a tensor where a tensor should be.",
            why=str(error).split("\n", maxsplit=1)[0],
            fix="do not use this checkpoint, and find out who changed it",
        ) from None


def shapes(index: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor."""
    return {
        path: (entry.size, entry.properties.dtype)
        for path, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_shards(
    store: Store, folder: str, index: Metadata, files: Mapping[str, FileFact], into: dict[str, Any]
) -> None:
    """Reads into tensors, whole or sharded, what belongs there.

    Args:
        store, folder: the checkpoint.
        index: its index.
        files: its files; the index may name no other.
        into: tensors by path, each of the global shape that the index says.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(into, index)
    by_file = defaultdict(list)
    for item in planner.create_local_plan().items:
        info = index.storage_data[item.storage_index]
        by_file[info.relative_path].append((info.offset, info.length, item))
    for name, wanted in by_file.items():
        if name not in files:
            raise CheckpointError(
                "checkpoint-unsafe",
                f"the checkpoint's index points to {name!r}, which its manifest does not list.",
                why="a checkpoint reads its own files alone",
                fix="do not use this checkpoint, and find out who changed it",
            )
        with store.open(store.join(folder, name), "rb") as file:
            for offset, length, item in sorted(wanted, key=lambda entry: entry[0]):
                saved = _tensor(_create_file_view(cast(Any, file), offset, length), name)
                part = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
                planner.resolve_tensor(item).detach().copy_(part)
