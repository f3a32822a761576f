"""`NativeWriter` writes our own format: each rank its share of the tensors, rank 0 the index, the state and the manifest.

read            hook -> encode -> plan -> copy, if the loop goes on meanwhile
what follows    shards -> index, state, manifest, publish (rank 0)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from paceline.base.errors import CheckpointError
from paceline.checkpoint.agree import WriterPeers, agreed, collected, distinct
from paceline.checkpoint.format.checkpoint_format import Claimed, files_of
from paceline.checkpoint.format.manifest import NAME, STATE, Checksummed, FileFact, measure
from paceline.checkpoint.format.shards import INDEX, SavePlanner, write_index, write_shard
from paceline.checkpoint.format.share import FileShare
from paceline.checkpoint.staging import Staging
from paceline.checkpoint.state.train_state import Encoded, merge
from paceline.checkpoint.store import Store
from paceline.world.sharded import is_sharded, local


@dataclass(frozen=True)
class _WriterAssignment:
    """Which rank writes which tensors. It is valid as long as the tensors have the same names, shapes and layouts.

    Attributes:
        key: names, shapes and layouts of this rank's tensors.
        share: the share of this rank.
        index: torch's index without the places of tensors; on rank 0 only.
        shares: the shares of all ranks; on rank 0 only.
    """

    key: list[Any]
    share: FileShare
    index: Metadata | None
    shares: list[FileShare]


class NativeWriter:
    """Writes for one `Checkpointer`. Memory of the copy and the division of the tensors serve its next save, too."""

    def __init__(self) -> None:
        self._division: _WriterAssignment | None = None
        self._staging = Staging()

    def read(self, peers: WriterPeers, claimed: Claimed) -> Callable[[WriterPeers], int]:
        """See `FolderWriter`. Training may continue after it, if the save is in the background."""
        staged = claimed.staged
        state = claimed.state
        hook = claimed.extra_files_hook
        agreed(peers, f"opening {staged}", lambda: _check_shared(claimed.store, staged, peers.rank))
        if hook is not None:
            agreed(peers, "running the hook that adds files", lambda: hook(staged))
        encoded = agreed(peers, "reading the state", lambda: state.encode(peers.rank))
        # Ranks with equal JSON send it once only.
        shared = merge(distinct(peers, encoded.shared))
        division = self._divide(peers, encoded)
        share = division.share

        def copy() -> Callable[[], Iterable[Any]]:
            tensors = [local(encoded.tensors[place.index.fqn]) for place in share.places]
            if claimed.background:
                # This copy takes nearly all of the time for which training waits.
                self._staging.copy(share, tensors)
                return self._staging.pieces
            return lambda: share.pieces(tensors)

        pieces = agreed(peers, "copying the state", copy)
        shared["rng"] = merge(peers.collect_object(encoded.own))
        return lambda writing_peers: self._write(writing_peers, claimed, division, shared, pieces)

    def _divide(self, peers: WriterPeers, encoded: Encoded) -> _WriterAssignment:
        """Plans which rank writes which tensors, or returns the plan of the last save.

        Planning takes time for each tensor of each rank, so it is only done again if names, shapes or layouts have changed on
        some rank.
        """
        last = self._division
        key: list[Any] = [(path, *_layout(tensor)) for path, tensor in encoded.tensors.items()]
        key.append(tuple(encoded.pinned))
        unchanged = last is not None and last.key == key
        if not peers.any(not unchanged):
            assert last is not None
            return last
        planner = SavePlanner(encoded.tensors, encoded.pinned)
        plans = collected(peers, "planning the shards", planner.create_local_plan)

        def divide() -> tuple[Metadata | None, list[FileShare]]:
            # Only rank 0 plans. When every rank got the plans of all ranks, each of 2,048 ranks planned the same checkpoint
            # for 3 to 5 seconds, and was sent 8.8 MB for 12 parameters.
            if peers.rank:
                return None, []
            global_plans, index = planner.create_global_plan(plans)
            return index, [FileShare.of(plan.items) for plan in global_plans]

        index, shares = agreed(peers, "planning the shards", divide)
        self._division = _WriterAssignment(key, peers.scatter_object(shares), index, shares)
        return self._division

    def _write(
        self,
        peers: WriterPeers,
        claimed: Claimed,
        division: _WriterAssignment,
        shared: dict[str, Any],
        pieces: Callable[[], Iterable[Any]],
    ) -> int:
        """Writes and publishes what was read: the JSON of all ranks, and the content of this rank's file. Ranks: all."""
        store = claimed.store
        staged = claimed.staged

        def write() -> dict[str, FileFact]:
            if not division.share.places:
                return {}
            return write_shard(store, staged, _name(peers.rank), pieces())

        facts: dict[str, FileFact] = {}

        def publish() -> None:
            for files in written:
                facts.update(files)
            results: list[WriteResult] = []
            for rank, share in enumerate(division.shares):
                results += share.results(_name(rank))
            assert division.index is not None, "rank 0 publishes, and has made it"
            facts[INDEX] = write_index(store, staged, division.index, results)
            with store.open(store.join(staged, STATE), "wb") as file:
                stream = Checksummed(file)
                stream.write(json.dumps(shared).encode())
            facts[STATE] = stream.fact
            for name in store.files(staged):
                if name not in facts:  # a user's hook has added it
                    facts[name] = measure(store, store.join(staged, name))
            # The manifest comes last: a folder without one is no checkpoint, wherever the process was cut off.
            replace(claimed.manifest, files=facts).write(store, staged)
            store.publish(staged, claimed.home, last=NAME, owned=partial(files_of, store))

        # Every file of every rank is written and durable before rank 0 publishes.
        written = collected(peers, f"writing the shards into {staged}", write)
        agreed(peers, f"publishing {claimed.home}", lambda: publish() if peers.rank == 0 else None)
        return sum(fact.bytes for fact in facts.values())


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the properties of a tensor that decide which rank writes which part of it."""
    if is_sharded(tensor):
        return tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements
    return tensor.shape, tensor.dtype


def _name(rank: int) -> str:
    """Returns the name of the file that a rank writes, as torch's distributed checkpoint names it."""
    return f"__{rank}_0.distcp"


def _check_shared(store: Store, staged: str, rank: int) -> None:
    if not store.exists(staged):
        raise CheckpointError(
            "checkpoint-not-shared",
            f"rank {rank} cannot see {staged}, which rank 0 has created.",
            why="all ranks write their parts into the same folder",
            fix="save to a folder that all hosts share",
        )
