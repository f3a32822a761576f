"""accelerate's checkpoint folders, as one of the formats that a run goes on from."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from paceline.checkpoint.format.checkpoint_format import CheckpointFormat, RunNames, Summary
from paceline.checkpoint.store import Store

if TYPE_CHECKING:
    from paceline.checkpoint.format.translation import OpenCheckpoint
    from paceline.checkpoint.state.train_state import TrainState
    from paceline.checkpoint.weights.sources import Weights


class AccelerateFormat(CheckpointFormat):
    """What accelerate's `save_state` writes, also where its FSDP divided the model."""

    name = "accelerate"

    def recognises(self, store: Store, folder: str) -> bool:
        """Whether the random streams of rank 0 lie there."""
        return os.path.isfile(os.path.join(folder, "random_states_0.pkl"))

    def summary(self, store: Store, folder: str) -> Summary:
        """How many ranks left random streams."""
        ranks = [name for name in os.listdir(folder) if name.startswith("random_states_")]
        return Summary(world_size=len(ranks))

    def read(self, store: Store, folder: str, state: TrainState, names: RunNames) -> OpenCheckpoint:
        """Everything but the tensors; see `checkpoint_format_state`."""
        from paceline.compat.accelerate.checkpoint_format_state import AccelerateReader

        return AccelerateReader(store, folder, state, names).read()

    def weights(self, store: Store, folder: str, model: str) -> Weights | None:
        """A model that FSDP divided, or one after the first; those of the usual names are read without this format."""
        from paceline.checkpoint.weights.opening import distributed_weights, weights_in_files
        from paceline.checkpoint.weights.sources import KINDS

        number = int(model.rpartition("_")[2]) if re.fullmatch(r"model_\d+", model) else 0
        divided = store.join(folder, f"pytorch_model_fsdp_{number}")
        if store.exists(store.join(divided, ".metadata")):
            return distributed_weights(store, divided)
        end = f"_{number}" if number else ""
        names = [f"{stem}{end}.{ending}" for stem, ending in (*KINDS, ("pytorch_model_fsdp", "bin"))]
        present = [name for name in names if os.path.isfile(os.path.join(folder, name))]
        if not present or (number == 0 and present[0] != "pytorch_model_fsdp.bin"):
            return None
        return weights_in_files([os.path.join(folder, present[0])])


CHECKPOINT_FORMAT = AccelerateFormat()
