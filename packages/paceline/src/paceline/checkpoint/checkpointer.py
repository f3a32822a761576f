"""`Checkpointer`: saves and loads a `TrainState`. A crash at any moment leaves the previous checkpoint intact.

    save   claim a folder (rank 0) -> read the state | -> write the files, publish -> prune (rank 0)
    load   format -> verify (the ranks share the files) -> open -> match (nothing is changed before) -> read -> apply

After each arrow the ranks compare the outcome (`agree`): an error on one rank is raised on all of them. A save in the
background copies this rank's share at the bar and returns; a thread does the rest, over a process group of its own. What lies
between the claim and the pruning is the layout's: a `FolderWriter`, of which `NativeWriter` is ours.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from paceline.base import env
from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint import retention
from paceline.checkpoint.agree import Alone, WriterPeers, agreed, raise_alike, together
from paceline.checkpoint.background import Background
from paceline.checkpoint.format.checkpoint_format import (
    CHECKPOINT_FORMATS,
    NATIVE,
    CheckpointFormat,
    Claimed,
    FolderReader,
    FolderWriter,
    files_of,
    format_of,
    recover_one,
)
from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.format.native_writer import NativeWriter
from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.ownership import Ownership
from paceline.checkpoint.save_report import SaveReport
from paceline.checkpoint.search import CheckpointSearch
from paceline.checkpoint.state.match import Mismatch
from paceline.checkpoint.state.train_state import Restore, TrainState
from paceline.checkpoint.store import Store, claim, discard, store_for
from paceline.world.events import SavedCheckpoint

_log = logging.getLogger("paceline.checkpoint")


@dataclass(frozen=True)
class Loaded:
    """The result of a load.

    Attributes:
        path: the checkpoint.
        manifest: its manifest; None for a checkpoint of another library.
        notes: sentences about what is not exactly as it was; they are also logged.
    """

    path: str
    manifest: Manifest | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Opened:
    """What rank 0 has decided about a save before its state is read.

    Attributes:
        home: the final folder.
        staged: the folder into which it is written first.
        metrics: the metrics of the script, as numbers.
        runs: the names of this run, for the manifest.
    """

    home: str
    staged: str
    metrics: dict[str, float]
    runs: list[str]


class Checkpointer:
    """Saves and loads train states.

    Args:
        collectives: the ranks that save and load together; None for this process only.
        keep: which automatically named checkpoints (`checkpoint_3`) are kept.
        tell: is called on rank 0 with the result of each save.

    Ranks: all must call each method, with equal arguments.
    """

    def __init__(
        self,
        collectives: WriterPeers | None = None,
        *,
        keep: Keep | None = None,
        tell: Callable[[SavedCheckpoint], object] | None = None,
    ) -> None:
        self._peers = collectives or Alone()
        self._tell = tell
        self._keep = keep or Keep()
        self._native = NativeWriter()
        self._background = Background()
        self._background_peers: WriterPeers | None = None
        self._ownership = Ownership()
        self._search = CheckpointSearch(self._peers)

    # ------------------------------------------------------------------ save

    def save(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        *,
        plan_json: str = "{}",
        extra_files_hook: Callable[[str], None] | None = None,
        metrics: Mapping[str, float] | None = None,
        background: bool = False,
        fresh: bool = False,
        writer: FolderWriter | None = None,
        keep: Keep | None = None,
        alone: bool = False,
    ) -> str:
        """Saves a state at `path`. A checkpoint that is there can be loaded until the new one replaces it.

        Files in the folder that belong to no checkpoint are kept. An earlier save in the background is waited for.

        Args:
            path: the folder of the checkpoint; it is created if it does not exist.
            state: the state to save.
            plan_json: `Plan.to_json()` of the run.
            extra_files_hook: called on each rank before the state is read, with the folder that is being written. Files that
                it writes there become a part of the checkpoint.
            metrics: for the manifest; those of rank 0 are used.
            background: whether to return as soon as this rank's share is copied. Host memory for one share is kept between
                saves. An error afterwards is raised by the next call of a method.
            fresh: whether `path` is an automatic name (`next_path`), which must be new. If another run has taken it since,
                the next free one is used.
            writer: writes the files of another layout than ours.
            keep: the rule for this save, in place of the one for all.
            alone: whether this rank saves by itself, and waits for no other one.

        Returns:
            The absolute path of the checkpoint.

        Raises:
            CheckpointError: `checkpoint-value`, `checkpoint-not-writable`, `checkpoint-disk-full`, `checkpoint-io`,
                `checkpoint-not-shared`, `checkpoint-failed`, `checkpoint-metric`. Earlier checkpoints are untouched.
        """
        peers: WriterPeers = Alone() if alone else self._peers
        keep = keep or self._keep
        report = SaveReport(self._tell if self._peers.rank == 0 else None, os.fspath(path), state.run.step)
        # There is one save at a time, since all saves use the same staging memory and the same background group. An error of
        # the last one is raised here, where all ranks are at the same place.
        self.wait()
        if background and self._background_peers is None:
            self._background_peers = self._peers.apart()
        later_peers = self._background_peers or self._peers
        store, home = _locate(path)

        def claim_folder() -> _Opened:
            if peers.rank:
                return _Opened(home, "", {}, [])
            return self._open(store, home, keep, metrics, fresh)

        with report.of_failure():
            # The result of rank 0 is used; the other ranks open nothing.
            opened = together(peers, f"opening {home}", claim_folder)[0]
        report.path = opened.home
        manifest = Manifest(
            {},
            state.run.step,
            peers.size,
            json.loads(plan_json),
            opened.metrics,
            run=env.get("PACELINE_RUN"),
            runs=opened.runs,
            writer=claim.record(),
        )
        claimed = Claimed(store, opened.home, opened.staged, state, manifest, extra_files_hook, background)

        def remove_unfinished() -> None:
            if peers.rank == 0:
                discard(store, opened.staged)

        with report.of_failure(remove_unfinished):
            write = (writer or self._native.read)(peers, claimed)

        def finish(peers: WriterPeers) -> None:
            with report.of_failure(remove_unfinished):
                size = write(peers)
            report.complete(size)
            agreed(peers, "removing old checkpoints", lambda: self._prune(peers, claimed, keep))

        if background:
            report.loop_goes_on()
            self._background.start(lambda: finish(later_peers))
        else:
            finish(peers)
        return opened.home

    def wait(self) -> None:
        """Waits for a save in the background, and raises its error on all ranks if it failed on any."""
        if self._background.started:
            raise_alike(self._peers, "saving in the background", self._background.wait())

    def busy(self) -> bool:
        """Returns whether a save in the background is running on any rank."""
        return self._background.started and any(self._peers.gather_object(self._background.running))

    def _open(self, store: Store, home: str, keep: Keep, metrics: Mapping[str, float] | None, fresh: bool) -> _Opened:
        """On the first rank: checks the metrics, takes the name, and creates the folder into which the save is written."""
        numbered = retention.number(store, home) is not None
        # Only automatic names are pruned, so only they need the metric by which that is done.
        rule = keep if numbered else Keep()
        numbers = rule.check(metrics)
        if store.exists(home) and not store.folder(home):
            raise CheckpointError(
                "checkpoint-not-writable",
                f"{home} is a file, not a folder.",
                why="a checkpoint is a folder of files",
                fix="save under another name",
            )
        folder = store.parent(home)[0]
        if numbered:
            self._ownership.look(store, folder)
        staged = ""
        while not staged:
            count = retention.number(store, home) or 0
            try:
                staged = store.stage(home, fresh=fresh)
            except claim.NameTakenError:
                home = retention.following(store, folder, count + 1)
                continue
            # Since the name was chosen, another run may have published it, and some after it, and have pruned it.
            above = retention.following(store, folder, count) if fresh else home
            if above != home:
                discard(store, staged)
                home, staged = above, ""
        name = store.parent(home)[1]

        def is_mine(other: str) -> bool:
            return other == name or (numbered and retention.PATTERN.fullmatch(other) is not None)

        # The name is taken before anything is cleaned. So no number comes back that a suspended process may still hold.
        store.recover(folder, is_mine, partial(files_of, store))
        return _Opened(home, staged, numbers, self._ownership.runs(folder))

    def _prune(self, peers: WriterPeers, claimed: Claimed, keep: Keep) -> None:
        store = claimed.store
        home = claimed.home
        damaged = self._search.damaged
        damaged.discard(home)
        if peers.rank or retention.number(store, home) is None:
            return
        folder = store.parent(home)[0]
        own = self._ownership.own(folder)
        own.add(home)
        for path in retention.surplus(store, folder, keep, home, damaged, own):
            retention.remove(store, path)
            own.discard(path)

    # ------------------------------------------------------------------ load

    def load(
        self,
        path: str | os.PathLike[str],
        state: TrainState,
        *,
        strict: bool = True,
        reader: FolderReader | None = None,
        alone: bool = False,
    ) -> Loaded:
        """Loads a checkpoint into a state, on any number of ranks. Nothing is changed unless it fits on all ranks.

        Args:
            path: the folder of the checkpoint.
            state: the state to load into, with the same prepared objects as were saved.
            strict: whether names and objects must be the same; shapes must be the same in any case.
            reader: reads the folder, in place of the format that recognises it.
            alone: whether this rank loads by itself, and waits for no other one.

        Raises:
            CheckpointError: `checkpoint-missing`, `checkpoint-none`, `checkpoint-newer`, `checkpoint-damaged`,
                `checkpoint-unsafe`, `checkpoint-other-model`, `checkpoint-owners`, `checkpoint-groups`.
        """
        self.wait()
        store, home = _locate(path)
        if reader is not None:
            peers: WriterPeers = Alone(self._peers.rank) if alone else self._peers
            return Loaded(home, None, _apply(home, reader(store, home, state, peers), strict, peers))
        # The result of rank 0 is used: on hosts without a shared folder the other ranks would find nothing.
        name = together(self._peers, f"looking for {home}", lambda: self._recognise(store, home))[0]
        checkpoint_format: CheckpointFormat = CHECKPOINT_FORMATS.get(name)
        manifest = None
        if checkpoint_format.has_manifest:
            manifest = agreed(self._peers, f"opening {home}", lambda: self._search.verified(store, home))
        checkpoint = checkpoint_format.open(store, home, state, self._peers, manifest)
        notes = _apply(home, checkpoint, strict, self._peers)
        if manifest is not None:
            agreed(self._peers, f"looking beside {home}", lambda: self._go_on(store, home))
        return Loaded(home, manifest, notes)

    def _go_on(self, store: Store, home: str) -> None:
        if self._peers.rank == 0:
            self._ownership.go_on(store, home)

    def go_on_from(self, path: str | os.PathLike[str]) -> None:
        """Counts what the run of a checkpoint has saved beside it as this run's own. Ranks: each by itself; rank 0's counts."""
        self._go_on(*_locate(path))

    def _recognise(self, store: Store, home: str) -> str:
        """On rank 0: returns the format of a folder; "native" if it is no checkpoint, so that the error names our files."""
        if self._peers.rank:
            return ""
        recover_one(store, home)
        checkpoint_format = format_of(store, home)
        return NATIVE if checkpoint_format is None else checkpoint_format.name

    # ------------------------------------------------------------------ names

    def next_path(self, root: str | os.PathLike[str], start: int = 0) -> str:
        """Returns the path of the next automatically named save: `ROOT/checkpoint_N`, for `save(fresh=True)`.

        N is larger than that of all checkpoints in the folder, and at least `start`.
        """
        store, folder = _locate(root)
        return together(self._peers, f"looking into {folder}", lambda: retention.following(store, folder, start))[0]

    def latest(self, root: str | os.PathLike[str], run: str = "") -> str | None:
        """Returns the newest undamaged checkpoint in a folder; damaged ones are logged and skipped.

        Args:
            root: the folder.
            run: the launcher's name of a run, to look only at checkpoints which that run has saved; "" for all.

        Returns:
            Its path; None if there are no checkpoints.

        Raises:
            CheckpointError: `checkpoint-damaged`, if there are checkpoints and all of them are damaged: a run should not
                silently start from the beginning then.
        """
        self.wait()
        store, folder = _locate(root)
        return self._search.newest(store, folder, run)


def _locate(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """Returns the store that serves a path, and the absolute path."""
    store = store_for(path)
    return store, store.resolve(os.fspath(path))


def _apply(home: str, checkpoint: OpenCheckpoint, strict: bool, peers: WriterPeers) -> tuple[str, ...]:
    """Compares the checkpoint with the state, and if it fits on all ranks, reads and applies it. Returns the notes."""
    state = checkpoint.state
    saved = checkpoint.saved

    # Nothing is changed before all ranks know that the checkpoint fits. If a rank refused it later, the model would be
    # loaded on some ranks only.
    def match() -> Restore:
        restore = state.match(saved, checkpoint.shapes, peers.rank, strict=strict)
        if restore.problems:
            raise CheckpointError.of(restore.problems)
        return restore

    restore = agreed(peers, f"comparing {home} with this run", match)
    notes = [*checkpoint.notes, *_judge(peers.gather_object(restore.mismatches), home, strict)]

    def read_and_apply() -> list[str]:
        checkpoint.read(restore.targets)
        for targets in state.sums(saved, checkpoint.shapes):
            checkpoint.read(targets)
        state.apply(saved, restore, peers.rank)
        return restore.notes

    for notes_of_rank in together(peers, f"reading {home}", read_and_apply):
        notes += notes_of_rank
    unique_notes = tuple(dict.fromkeys(notes))
    if peers.rank == 0:
        for note in unique_notes:
            _log.warning("loaded %s: %s", home, note)
    return unique_notes


def _judge(ranks: list[dict[str, Mismatch]], home: str, strict: bool) -> tuple[str, ...]:
    """Raises if names or shapes differ. Returns sentences about the names that a load with strict=False skips."""
    owners: dict[str, None] = {}
    for mismatches in ranks:
        owners |= dict.fromkeys(mismatches)
    models = [owner for owner in owners if owner.startswith("models/")]
    problems: list[Problem] = []
    notes = []
    # If a model differs, its optimizer differs for the same reason, so only the model is reported.
    for owner in models or owners:
        mismatch = Mismatch.of_all([mismatches.get(owner) for mismatches in ranks])
        if not strict and not mismatch.misshapen:
            notes.append(
                f"{owner}: {len(mismatch.missing)} names kept their values, "
                f"{len(mismatch.unexpected)} of the checkpoint were left out"
            )
        elif mismatch:
            unwanted = mismatch if strict else replace(mismatch, missing={}, unexpected={})
            problems.append(unwanted.problem(owner, home))
    if problems:
        raise CheckpointError.of(problems)
    return tuple(notes)
