"""Reads a folder of accelerate's `save_state` into a run under accelerate's names, by the format's own reader.

What differs from a run of ours: weights go to the models in the order of `prepare`, those for evaluation alone among them; of a
folder that holds more of a kind than was prepared the first are loaded; gradients that were not stepped stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.base.errors import Problem
from paceline.base.log import warn_once
from paceline.checkpoint.agree import WriterPeers, agreed
from paceline.checkpoint.format.checkpoint_format import RunNames
from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
from paceline.checkpoint.state.train_state import KINDS, TrainState
from paceline.checkpoint.store import Store
from paceline_accelerate.checkpoint_format_state import AccelerateReader
from paceline_accelerate.errors import MissingParts, refused_as

if TYPE_CHECKING:
    from paceline_accelerate.accelerator_base import AcceleratorBase


def read_folder(
    accelerator: AcceleratorBase,
    models: Sequence[nn.Module],
    streams: dict[str, Any],
    store: Store,
    home: str,
    state: TrainState,
    peers: WriterPeers,
) -> OpenCheckpoint:
    """Reads everything but the tensors; a `FolderReader`.

    Args:
        accelerator: into whose run it is read.
        models: those that no hook of the script has loaded.
        streams: gets what the file of this rank's random streams holds; that of rank 0's if there is none.
        store, home, state, peers: as of every `FolderReader`.

    Raises:
        MissingParts: `compat-checkpoint`, if the folder has fewer objects than were prepared.
    """
    named = {f"model_{number}" if number else "model": model for number, model in enumerate(models)}
    tied = {name: accelerator.run.prepared.names_of(model)[1] for name, model in named.items()}
    # accelerate saves an optimizer as one object, with what it steps through.
    optimizers = {name: each for name, each in state.optimizers.items() if name.startswith("optimizer")}
    state = state.narrowed(KINDS - {"window"}).of_parts(named, tied, optimizers)
    reader = _FirstOfEach(store, home, state, RunNames.of(state, peers, home))
    with refused_as(MissingParts, "compat-checkpoint"):
        opened = agreed(peers, f"reading {home}", reader.read)
    streams.update(reader.streams)
    return opened


class _FirstOfEach(AccelerateReader):
    """Reads as many objects of each kind as this run has."""

    def __init__(self, store: Store, folder: str, state: TrainState, names: RunNames) -> None:
        super().__init__(store, folder, state, names)
        self._num_here = {
            "model": len(state.models),
            "optimizer": len(state.optimizers),
            "scheduler": len(state.plain["schedulers"]),
            "object": len(state.plain["custom"]),
        }

    def read(self) -> OpenCheckpoint:
        """Reads the folder, if it has all that this run has."""
        wrong = []
        for single, num_here in self._num_here.items():
            num_saved = len(list(super()._numbered(single)))
            counts = f"{single}s: {num_here} here, {num_saved} in the folder"
            # As under accelerate, the number of registered objects has to be the very same.
            if num_here > num_saved or (single == "object" and num_here != num_saved):
                wrong.append(counts)
            elif num_here < num_saved:
                # This is no error: an evaluation script prepares only the model, and loads the folder of the training run.
                what = f"{self._folder} was saved by a run that prepared more, of which the first are loaded: {counts}."
                warn_once("compat", what)
        if wrong:
            what = f"{self._folder} was saved by a run that prepared other things."
            fix = "prepare and register the same things in the same order before `load_state`"
            raise MissingParts.of([Problem("compat-checkpoint", what, why=wrong, fix=fix)])
        return super().read()

    def _numbered(self, single: str) -> Iterator[tuple[str, int]]:
        yield from islice(super()._numbered(single), self._num_here[single])

    def _note_differences(self, steps: int | None) -> None:
        """Notes nothing: loaders and schedulers of this run go on as under accelerate."""
