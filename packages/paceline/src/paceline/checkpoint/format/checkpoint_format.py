"""`CheckpointFormat`: one kind of checkpoint folder, ours or another library's, in one file each.

    recognises      whether a folder is a checkpoint of this kind; all that follows is asked of the one that says so
    newest          the checkpoint that a folder of several says is its newest
    summary         what `paceline checkpoint ls` and `show` say of it
    record          whose it is, and its files: a run prunes only its own, and a save replaces only files of a save
    read, open      everything but the tensors, in the words of our `state.json`: `load_state`, `resume`
    weights         the tensors of one model: `load_model`, `paceline checkpoint export`

A format that is also written has a `FolderWriter`. `Checkpointer.save` claims a folder, and leaves the files in it to that one.

The file of a format is imported to ask whether it recognises a folder, also by commands that need no torch: it imports
torch, and whatever does so, within its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.base.errors import CheckpointError
from paceline.base.registry import Registry
from paceline.checkpoint.agree import WriterPeers, agreed, together
from paceline.checkpoint.store import Store

if TYPE_CHECKING:
    from paceline.checkpoint.format.manifest import Manifest
    from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
    from paceline.checkpoint.state.train_state import TrainState
    from paceline.checkpoint.weights.sources import Weights

CHECKPOINT_FORMATS = Registry("paceline.checkpoint_formats", "checkpoint format")
NATIVE = "native"


@dataclass(frozen=True)
class Summary:
    """Facts about a checkpoint that are known without reading tensors; None for those that its folder does not contain.

    Attributes:
        step: optimizer steps done.
        created: seconds since 1970, UTC.
        world_size: ranks that saved it.
    """

    step: int | None = None
    created: float | None = None
    world_size: int | None = None


@dataclass(frozen=True)
class RunNames:
    """The names of tensors and parameters on all ranks, for formats that identify them by name or by order.

    Attributes:
        rank: the rank of this process.
        tensors: for each model, the names of all its tensors.
        parameters: for each optimizer, the names of its parameters in order, each with the number of its group.
    """

    rank: int
    tensors: Mapping[str, set[str]]
    parameters: Mapping[str, list[tuple[str, int]]]

    @classmethod
    def of(cls, state: TrainState, peers: WriterPeers, folder: str) -> RunNames:
        """Gathers the names of all ranks. Under a pipeline each rank has those of its own stages only.

        Ranks: all; one `gather_object`.
        """
        from paceline.checkpoint.state.module_state import ModuleState

        own_tensors = {name: set(ModuleState.of(model).raw) for name, model in state.models.items()}
        own_parameters: dict[str, list[tuple[str, int]]] = {}
        for name, optimizer in state.optimizer_states().items():
            own_parameters[name] = list(optimizer.groups.items())
        names_by_rank = together(peers, f"comparing {folder}", lambda: (own_tensors, own_parameters))
        # All ranks have the same models and optimizers, whose names are united one by one.
        tensors: dict[str, set[str]] = {}
        for name in own_tensors:
            tensors[name] = set()
            for tensors_of_rank, _ in names_by_rank:
                tensors[name] |= tensors_of_rank[name]
        parameters: dict[str, list[tuple[str, int]]] = {}
        for name in own_parameters:
            pairs: list[tuple[str, int]] = []
            for _, parameters_of_rank in names_by_rank:
                pairs += parameters_of_rank[name]
            # Groups in their order. `sorted` is stable, so within a group lower ranks (earlier stages) come first.
            parameters[name] = sorted(dict.fromkeys(pairs), key=lambda pair: pair[1])
        return cls(peers.rank, tensors, parameters)


class CheckpointFormat:
    """One kind of checkpoint folder. A format overrides what its folders can give; `recognises` and `read` are enough.

    Attributes:
        name: as in the registry.
        has_manifest: whether our `manifest.json` says what belongs to a checkpoint, so that its files can be verified.
    """

    name: str
    has_manifest = False

    def recognises(self, store: Store, folder: str) -> bool:
        """Returns whether a folder is one checkpoint of this kind, by the names of its files."""
        raise NotImplementedError

    def newest(self, store: Store, folder: str) -> str | None:
        """Returns the checkpoint that a file in a folder of checkpoints names as the newest; None if there is no such file.

        Raises:
            CheckpointError: `checkpoint-unsafe`, where the name leads out of the folder.
        """
        return None

    def summary(self, store: Store, folder: str) -> Summary:
        """Returns facts about a checkpoint that are known without reading tensors."""
        return Summary()

    def record(self, store: Store, folder: str) -> Manifest | None:
        """Returns what a checkpoint says of its save: at least whose it is, and its files; None if it says nothing."""
        return None

    def read(self, store: Store, folder: str, state: TrainState, names: RunNames) -> OpenCheckpoint:
        """Reads everything except the tensors, for this rank, and changes nothing. See `Translation`.

        Args:
            store, folder: the checkpoint.
            state: the state of this run.
            names: the names of all ranks.

        Ranks: each by itself; `open` raises an error of one rank on all.

        Raises:
            CheckpointError: `checkpoint-damaged`, `checkpoint-unsafe`, `checkpoint-foreign`, `checkpoint-groups`.
        """
        raise CheckpointError(
            "checkpoint-foreign",
            f"{folder} holds only weights.",
            why=f"its format is {self.name!r}, which keeps no state of a run",
            fix="load it with `load_model`",
        )

    def open(
        self, store: Store, folder: str, state: TrainState, peers: WriterPeers, manifest: Manifest | None
    ) -> OpenCheckpoint:
        """Reads everything except the tensors, for all ranks together.

        Args:
            store, folder, state: as in `read`.
            peers: the ranks that load together.
            manifest: the manifest with which the files were compared; None if the format has none.

        Ranks: all.
        """
        names = RunNames.of(state, peers, folder)
        return agreed(peers, f"reading {folder}", lambda: self.read(store, folder, state, names))

    def weights(self, store: Store, folder: str, model: str) -> Weights | None:
        """Returns the tensors of one model; None if the folder has none in this format.

        The folder need not be a whole checkpoint: it may contain a model alone.

        Args:
            store, folder: the folder.
            model: the name of the model in a checkpoint of several, such as "model_1"; empty for the only one.

        Raises:
            CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`.
        """
        return None

    def tied_names(self, store: Store, folder: str) -> Mapping[str, str]:
        """Returns further names of tied tensors of the first model, with the names under which `weights` has them."""
        return {}


@dataclass(frozen=True)
class Claimed:
    """A folder that a save has claimed, and what belongs into it.

    Attributes:
        store: where it is written.
        home: the final folder of the checkpoint.
        staged: the folder into which it is written first. Rank 0 has created it.
        state: the state to save.
        manifest: what a manifest says of the save, without the files.
        extra_files_hook: writes further files into `staged`; called on each rank before the state is read.
        background: whether the state may change as soon as it was read.
    """

    store: Store
    home: str
    staged: str
    state: TrainState
    manifest: Manifest
    extra_files_hook: Callable[[str], None] | None
    background: bool


# Reads the state of a save, and returns what does the rest of it, later and with a group of its own: it writes the files, moves
# the folder to its place when all are there, and returns the number of bytes on rank 0. Ranks: all call both.
FolderWriter = Callable[[WriterPeers, Claimed], Callable[[WriterPeers], int]]

# Reads everything but the tensors of a folder, in place of the format that recognises it; see `CheckpointFormat.open`.
FolderReader = Callable[[Store, str, "TrainState", WriterPeers], "OpenCheckpoint"]


def formats() -> Iterator[CheckpointFormat]:
    """Yields all formats. Ours comes first: a folder with our manifest is ours, whatever else it contains."""
    yield CHECKPOINT_FORMATS.get(NATIVE)
    for name in CHECKPOINT_FORMATS.names():
        if name != NATIVE:
            yield CHECKPOINT_FORMATS.get(name)


def format_of(store: Store, folder: str) -> CheckpointFormat | None:
    """Returns the format of a checkpoint folder; None if the folder is no checkpoint."""
    for candidate in formats():
        if candidate.recognises(store, folder):
            return candidate
    return None


def record_of(store: Store, folder: str) -> Manifest | None:
    """Returns what the checkpoint in a folder says of its save; None if it is none, or says nothing."""
    checkpoint_format = format_of(store, folder)
    return None if checkpoint_format is None else checkpoint_format.record(store, folder)


def files_of(store: Store, folder: str) -> list[str] | None:
    """Returns the files of the checkpoint in a folder, as it says itself; None if it is none, or says nothing."""
    checkpoint_format = format_of(store, folder)
    record = None if checkpoint_format is None else checkpoint_format.record(store, folder)
    if checkpoint_format is None or record is None:
        return None
    return record.paths() if checkpoint_format.has_manifest else list(record.files) or None


def recover_one(store: Store, home: str) -> None:
    """Finishes a save into a folder that was cut off while its files took their place, for who is about to read it."""
    folder, name = store.parent(home)
    store.recover(folder, lambda other: other == name, partial(files_of, store), clean=False)


def newest_in(store: Store, folder: str) -> str:
    """Returns the checkpoint that a folder names as its newest; the folder itself if it names none or is one of ours."""
    for candidate in formats():
        if candidate.has_manifest and candidate.recognises(store, folder):
            return folder
        newest = candidate.newest(store, folder)
        if newest is not None:
            return newest
    return folder
