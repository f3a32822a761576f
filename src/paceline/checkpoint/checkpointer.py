"""`Checkpointer`: saves a `TrainState` so that a crash at any moment leaves the last checkpoint whole, and loads it.

    save   stage (rank 0) -> hook -> encode -> plan -> shards -> index, state, manifest, publish, prune (rank 0)
    load   manifest -> verify (the ranks share the files) -> match (nothing is touched before) -> read -> apply

Each arrow is one agreement of all ranks (`agree.together`): what fails on one fails on all, with the same error.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint import retention
from paceline.checkpoint.agree import Alone, Peers, agreed, distinct, together
from paceline.checkpoint.manifest import NAME, Checksummed, FileFact, Manifest, measure, verify
from paceline.checkpoint.match import Mismatch
from paceline.checkpoint.shards import INDEX, SavePlanner, read_index, read_shards, shapes, write_index, write_shard
from paceline.checkpoint.state import Encoded, Restore, TrainState, merge
from paceline.checkpoint.store import Store, store_for

_log = logging.getLogger("paceline.checkpoint")
STATE = "state.json"


@dataclass(frozen=True)
class Loaded:
    """What a load did.

    Attributes:
        path: the checkpoint.
        manifest: its manifest.
        notes: what is not exactly as it was, in words; said once in the log too.
    """

    path: str
    manifest: Manifest
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Written:
    """What one rank put into its shard."""

    results: list[WriteResult]
    files: dict[str, FileFact]
    own: dict[str, Any]


class Checkpointer:
    """Saves and loads train states; holds none itself.

    Args:
        collectives: the ranks that save and load together; None for this process alone.
        store: where checkpoints lie; by default the one that serves the path.
        keep_last: how many automatically named checkpoints (`checkpoint_3`) a folder keeps; None keeps all.

    Ranks: all must call each method, with equal arguments.
    """

    def __init__(
        self, collectives: Peers | None = None, *, store: Store | None = None, keep_last: int | None = None
    ) -> None:
        retention.Keep(keep_last)
        self._peers = collectives or Alone()
        self._store = store
        self._keep_last = keep_last

    # ------------------------------------------------------------------ save

    def save(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        *,
        plan_json: str = "{}",
        extra_files_hook: Callable[[str], None] | None = None,
    ) -> str:
        """Saves a state at `path`; a checkpoint that stands there stays loadable until the new one takes its place.

        Files in the folder that belong to no checkpoint are kept.

        Args:
            path: folder of the checkpoint; made, with its parents, where it is missing.
            state: what to save.
            plan_json: `Plan.to_json()` of the run.
            extra_files_hook: called on each rank before the state is read, with the folder that is being written;
                the files that it puts there belong to the checkpoint.

        Returns:
            The checkpoint's path, absolute.

        Raises:
            CheckpointError: `checkpoint-value`, `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`,
                `checkpoint-not-shared`, `checkpoint-failed`; nothing that was saved before is lost.
        """
        store = self._store or store_for(path)
        home = store.resolve(os.fspath(path))
        staged = together(self._peers, f"opening {home}", lambda: self._stage(store, home))[0]
        try:
            self._fill(store, staged, home, state, plan_json, extra_files_hook)
        except BaseException:
            self._discard(store, staged)
            raise
        if self._keep_last and retention.number(store, home) is not None and self._peers.rank == 0:
            retention.prune(store, store.parent(home)[0], self._keep_last, home)
        return home

    def _stage(self, store: Store, home: str) -> str:
        if self._peers.rank:
            return ""
        folder, name = store.parent(home)
        if store.exists(home) and not store.folder(home):
            raise CheckpointError(
                "checkpoint-not-writable",
                f"{home} is a file, not a folder.",
                why="a checkpoint is a folder of files",
                fix="save under another name",
            )
        numbered = retention.number(store, home) is not None
        store.recover(
            folder,
            lambda other: other == name or (numbered and retention.PATTERN.fullmatch(other) is not None),
            lambda left: _files(store, left),
        )
        return store.stage(home)

    def _fill(
        self,
        store: Store,
        staged: str,
        home: str,
        state: TrainState,
        plan_json: str,
        hook: Callable[[str], None] | None,
    ) -> None:
        peers = self._peers
        agreed(peers, f"opening {staged}", lambda: _check_shared(store, staged, peers.rank))
        if hook is not None:
            agreed(peers, "running the hook that adds files", lambda: hook(staged))
        encoded = agreed(peers, "reading the state", lambda: state.encode(peers.rank))
        shared = merge(distinct(peers, encoded.shared))
        index, written = self._write(store, staged, encoded)

        def finish() -> None:
            shared["rng"] = merge([part.own for part in written])
            facts = {name: fact for part in written for name, fact in part.files.items()}
            facts[INDEX] = write_index(store, staged, index, [part.results for part in written])
            facts[STATE] = _write_json(store, store.join(staged, STATE), shared)
            extra = [name for name in store.files(staged) if name not in facts]
            facts.update({name: measure(store, store.join(staged, name)) for name in extra})
            Manifest(facts, state.run.step, peers.size, json.loads(plan_json)).write(store, staged)
            store.publish(staged, home, last=NAME, replaces=_files(store, home))

        agreed(peers, f"publishing {home}", finish if peers.rank == 0 else lambda: None)

    def _write(self, store: Store, staged: str, encoded: Encoded) -> tuple[Metadata, list[_Written]]:
        peers = self._peers
        planner = SavePlanner(encoded.tensors, encoded.pinned)
        plans = together(peers, "planning the shards", planner.create_local_plan)
        index: list[Metadata] = []

        def write() -> _Written:
            plan, metadata = planner.create_global_plan(plans)  # the same on every rank: no second exchange
            index.append(metadata)
            mine = planner.finish_plan(plan[peers.rank])
            results, files = write_shard(store, staged, f"__{peers.rank}_0.distcp", mine, planner)
            return _Written(results, files, encoded.own)

        written = together(peers, f"writing the shards into {staged}", write)
        return index[0], written

    def _discard(self, store: Store, staged: str) -> None:
        if self._peers.rank == 0 and store.exists(staged):
            try:
                store.remove(staged)
            except OSError as error:  # the save's own error is on its way; the next save cleans up
                _log.warning("could not remove the unfinished %s (%s); the next save tries again", staged, error)

    # ------------------------------------------------------------------ load

    def load(self, path: str | os.PathLike[str], state: TrainState, *, strict: bool = True) -> Loaded:
        """Gives a state back what was saved, at any width; touches nothing before all ranks agree that it fits.

        Args:
            path: folder of the checkpoint.
            state: what to load into: the same objects, prepared, as were saved.
            strict: whether names and objects must be the same; shapes must always be.

        Raises:
            CheckpointError: `checkpoint-missing`, `checkpoint-none`, `checkpoint-newer`, `checkpoint-damaged`,
                `checkpoint-unsafe`, `checkpoint-other-model`, `checkpoint-owners`, `checkpoint-groups`.
        """
        store = self._store or store_for(path)
        home = store.resolve(os.fspath(path))
        peers = self._peers
        agreed(peers, f"looking for {home}", lambda: self._look(store, home))
        manifest = agreed(peers, f"opening {home}", lambda: self._verified(store, home))
        index = agreed(peers, f"reading the index of {home}", lambda: read_index(store, home))
        saved = agreed(peers, f"reading {STATE} of {home}", lambda: _read_state(store, home))

        def match() -> Restore:
            restore = state.match(saved, shapes(index), peers.rank, strict=strict)
            if restore.problems:
                raise CheckpointError.of(restore.problems)
            return restore

        restore = agreed(peers, f"comparing {home} with this run", match)
        notes = _judge(peers.gather_object(restore.mismatches), home, strict)

        def read() -> list[str]:
            read_shards(store, home, index, manifest.files, restore.targets)
            state.apply(saved, restore, peers.rank)
            return restore.notes

        ranks = together(peers, f"reading {home}", read)
        said = tuple(dict.fromkeys([*notes, *(note for theirs in ranks for note in theirs)]))
        if peers.rank == 0:
            for note in said:
                _log.warning("loaded %s: %s", home, note)
        return Loaded(home, manifest, said)

    def _look(self, store: Store, home: str) -> None:
        if self._peers.rank == 0 and not store.exists(home):
            folder, name = store.parent(home)
            store.recover(folder, lambda other: other == name, lambda left: _files(store, left), clean=False)

    def _verified(self, store: Store, home: str) -> Manifest:
        _check_present(store, home)
        manifest = Manifest.read(store, home)
        share = sorted(manifest.files)[self._peers.rank :: self._peers.size]
        problems = verify(home, store, names=share, manifest=manifest)
        if problems:
            raise CheckpointError.of(problems)
        return manifest

    # ------------------------------------------------------------------ names

    def next_path(self, root: str | os.PathLike[str], start: int = 0) -> str:
        """The automatic name for the next save: `ROOT/checkpoint_N`, above all that lie there, N at least `start`."""
        store = self._store or store_for(root)
        folder = store.resolve(os.fspath(root))
        return together(self._peers, f"looking into {folder}", lambda: retention.following(store, folder, start))[0]

    def latest(self, root: str | os.PathLike[str]) -> str | None:
        """The newest checkpoint in a folder that verifies; damaged ones are named in the log and passed over."""
        store = self._store or store_for(root)
        folder = store.resolve(os.fspath(root))
        newest = together(
            self._peers,
            f"looking into {folder}",
            lambda: retention.newest(store, folder) if self._peers.rank == 0 else None,
        )
        return newest[0]


def _files(store: Store, folder: str) -> list[str] | None:
    """Files of the checkpoint that stands in a folder, its manifest included; None where none stands there."""
    manifest = Manifest.find(store, folder)
    return None if manifest is None else [*manifest.files, NAME]


def _check_shared(store: Store, staged: str, rank: int) -> None:
    if not store.exists(staged):
        raise CheckpointError(
            "checkpoint-not-shared",
            f"rank {rank} does not see {staged}, which rank 0 made.",
            why="each rank writes its part into one folder",
            fix="save to a folder that all hosts share",
        )


def _write_json(store: Store, path: str, tree: Any) -> FileFact:
    with store.open(path, "wb") as file:
        stream = Checksummed(file)
        stream.write(json.dumps(tree).encode())
    return stream.fact


def _read_state(store: Store, home: str) -> dict[str, Any]:
    with store.open(store.join(home, STATE), "rb") as file:
        tree: dict[str, Any] = json.loads(file.read())
    return tree


def _check_present(store: Store, home: str) -> None:
    if store.exists(store.join(home, NAME)):
        return
    near = retention.near(store, home)
    listed = f"checkpoints near it: {', '.join(near)}" if near else "no checkpoint lies near it"
    fix = f"load {near[-1]}" if near else "check the path; a finished checkpoint has a manifest.json"
    if not store.exists(home):
        raise CheckpointError("checkpoint-missing", f"there is no checkpoint {home}.", why=listed, fix=fix)
    if not store.folder(home):
        raise CheckpointError(
            "checkpoint-none", f"{home} is not a checkpoint: it is a file, not a folder.", why=listed, fix=fix
        )
    names = store.list(home)
    inside = f"it holds {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}" if names else "it is empty"
    raise CheckpointError(
        "checkpoint-none", f"{home} is not a checkpoint: it has no {NAME}.", why=[inside, listed], fix=fix
    )


def _judge(ranks: list[dict[str, Mismatch]], home: str, strict: bool) -> tuple[str, ...]:
    """Raises where names or shapes differ; returns what a load that is not strict leaves out, in words."""
    owners = dict.fromkeys(owner for rank in ranks for owner in rank)
    if any(owner.startswith("models/") for owner in owners):  # an optimizer of another model says nothing new
        owners = {owner: None for owner in owners if owner.startswith("models/")}
    problems: list[Problem] = []
    notes = []
    for owner in owners:
        mismatch = Mismatch.of_all([rank.get(owner) for rank in ranks])
        if not strict and not mismatch.misshapen:
            notes.append(
                f"{owner}: {len(mismatch.missing)} names kept their values, "
                f"{len(mismatch.unexpected)} of the checkpoint were left out"
            )
        elif mismatch:
            kept = mismatch if strict else replace(mismatch, missing={}, unexpected={})
            problems.append(kept.problem(owner, home))
    if problems:
        raise CheckpointError.of(problems)
    return tuple(notes)
