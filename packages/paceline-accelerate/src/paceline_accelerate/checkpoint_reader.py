"""Reads a folder of accelerate's `save_state` into a run under accelerate's names, by the format's own reader.

What differs from a run of ours: weights go to the models in the order of `prepare`, those for evaluation alone among them; of a
folder that holds more of a kind than was prepared the first are loaded; gradients that were not stepped stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.base.errors import Problem
from paceline.base.log import warn_once
from paceline.checkpoint.agree import WriterPeers, agreed
from paceline.checkpoint.format.checkpoint_format import RunNames
from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
from paceline.checkpoint.state.train_state import KINDS, TrainState
from paceline.checkpoint.store import Store
from paceline_accelerate.checkpoint_format_state import MODELS, OBJECTS, OPTIMIZERS, SCHEDULERS, AccelerateReader
from paceline_accelerate.errors import MissingParts, refused_as

if TYPE_CHECKING:
    from paceline_accelerate.accelerator_base import AcceleratorBase


class PreparedReader:
    """Reads one folder; a `FolderReader`.

    Args:
        accelerator: into whose run it is read.
        models: those that no hook of the script has loaded.

    Attributes:
        streams: what the file of this rank's random streams holds, after the load; that of rank 0's if there is none.
    """

    def __init__(self, accelerator: AcceleratorBase, models: Sequence[nn.Module]) -> None:
        self._prepared = accelerator.run.prepared
        self._models = models
        self.streams: Mapping[str, Any] = {}

    def __call__(self, store: Store, home: str, state: TrainState, peers: WriterPeers) -> OpenCheckpoint:
        """Reads everything but the tensors. Ranks: those of `peers`.

        Raises:
            MissingParts: `compat-checkpoint`, if the folder has fewer objects than were prepared.
            CheckpointError: as `CheckpointFormat.read`.
        """
        state = state.narrowed(KINDS - {"window"})
        state.models = {f"model_{number}" if number else "model": model for number, model in enumerate(self._models)}
        state.tied = {name: self._prepared.names_of(model)[1] for name, model in state.models.items()}
        # accelerate saves an optimizer as one object, with what it steps through.
        state.optimizers = {name: each for name, each in state.optimizers.items() if name.startswith("optimizer")}
        names = RunNames.of(state, peers, home)
        reader = _FirstOfEach(store, home, state, names)
        with refused_as(MissingParts, "compat-checkpoint"):
            opened = agreed(peers, f"reading {home}", reader.read)
        self.streams = reader.streams
        return opened


class _FirstOfEach(AccelerateReader):
    """Reads as many objects of each kind as this run has."""

    def __init__(self, store: Store, folder: str, state: TrainState, names: RunNames) -> None:
        super().__init__(store, folder, state, names)
        self._kinds = {
            "model": ("models", MODELS, len(state.models)),
            "optimizer": ("optimizers", OPTIMIZERS, len(state.optimizers)),
            "scheduler": ("schedulers", SCHEDULERS, len(state.plain["schedulers"])),
            "object": ("registered objects", OBJECTS, len(state.plain["custom"])),
        }

    def read(self) -> OpenCheckpoint:
        """Reads the folder, if it has all that this run has."""
        wrong = []
        for single, (kind, pattern, num_here) in self._kinds.items():
            num_saved = len(list(super()._numbered(single, pattern)))
            counts = f"{kind}: {num_here} here, {num_saved} in the folder"
            # As under accelerate, the number of registered objects has to be the very same.
            if num_here > num_saved or (single == "object" and num_here != num_saved):
                wrong.append(counts)
            elif num_here < num_saved:
                # This is no error: an evaluation script prepares only the model, and loads the folder of the training run.
                warn_once(
                    "compat",
                    f"{self._folder} was saved by a run that prepared more, of which the first are loaded: {counts}.",
                )
        if wrong:
            what = f"{self._folder} was saved by a run that prepared other things."
            fix = "prepare and register the same things in the same order before `load_state`"
            raise MissingParts.of([Problem("compat-checkpoint", what, why=wrong, fix=fix)])
        return super().read()

    def _numbered(self, single: str, pattern: str) -> Iterator[tuple[str, int]]:
        _, _, num_here = self._kinds[single]
        for name, number in super()._numbered(single, pattern):
            if number < num_here:
                yield name, number

    def _note_differences(self, steps: int | None) -> None:
        """Notes nothing: loaders and schedulers of this run go on as under accelerate."""
