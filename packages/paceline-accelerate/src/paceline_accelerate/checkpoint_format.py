"""The checkpoint format of accelerate's `save_state`: a run of Paceline can resume from such a folder.

    model.safetensors, pytorch_model.bin      weights of the first model (model_1..., pytorch_model_1... of the next)
    optimizer.bin, scheduler.bin              states of the first ones; optimizer_1.bin, ... of the next
    scaler.pt, dl_state_dict.bin              the loss scale; positions of loaders, with `use_stateful_dataloader`
    custom_checkpoint_0.pkl                   registered objects
    pytorch_model/                            what DeepSpeed's engine saves (pytorch_model_1/ for the next engine)
    random_states_0.pkl                       one file a rank: random streams, the step, positions of the loaders, and who has
                                              saved it; the last two are not accelerate's

The core finds it through `CHECKPOINT_FORMAT`. `checkpoint_format_state` reads what a folder holds, for a run of Paceline;
`checkpoint` reads it under accelerate's names, and `checkpoint_writer` writes it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.checkpoint_format import CheckpointFormat, RunNames, Summary
from paceline.checkpoint.store import Store
from paceline_accelerate.folder_names import RECORD, STREAMS_OF_RANK_0

if TYPE_CHECKING:
    from paceline.checkpoint.format.manifest import Manifest
    from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
    from paceline.checkpoint.state.train_state import TrainState
    from paceline.checkpoint.weights.sources import Weights


class AccelerateFormat(CheckpointFormat):
    """Reads folders that accelerate's `save_state` wrote, also those of a model that FSDP divided."""

    name = "accelerate"

    def recognises(self, store: Store, folder: str) -> bool:
        """Whether the folder has the random streams of rank 0, which accelerate saves always."""
        return os.path.isfile(os.path.join(folder, STREAMS_OF_RANK_0))

    def summary(self, store: Store, folder: str) -> Summary:
        """Returns the number of ranks, each of which saved a file of random streams."""
        stream_files = [name for name in os.listdir(folder) if name.startswith("random_states_")]
        return Summary(world_size=len(stream_files))

    def record(self, store: Store, folder: str) -> Manifest | None:
        """Returns what the random streams of rank 0 say of the save. Folders of accelerate itself say nothing."""
        from paceline.checkpoint.format.manifest import FileFact, Manifest
        from paceline_accelerate.surroundings import load

        try:
            record = load(os.path.join(folder, STREAMS_OF_RANK_0)).get(RECORD, {})
            files = dict.fromkeys(record.get("files", ()), FileFact(0, ""))
            found = Manifest(files, record.get("step", 0), runs=record.get("runs", []), writer=record.get("writer", {}))
            found.check()
        except (CheckpointError, ValueError):  # it cannot be read, or names files outside of the folder
            return None
        return found

    def read(self, store: Store, folder: str, state: TrainState, names: RunNames) -> OpenCheckpoint:
        """Reads everything but the tensors; see `checkpoint_format_state`."""
        from paceline_accelerate.checkpoint_format_state import AccelerateReader

        return AccelerateReader(store, folder, state, names).read()

    def weights(self, store: Store, folder: str, model: str) -> Weights | None:
        """Opens the weights of a model that FSDP divided, or of one after the first.

        Returns None for any other, whose files have the usual names: the core reads them without a format.
        """
        from paceline.checkpoint.weights.opening import distributed_weights, weights_in_files
        from paceline.checkpoint.weights.sources import KINDS

        match = re.fullmatch(r"model_(\d+)", model)
        number = int(match[1]) if match else 0
        divided_folder = store.join(folder, f"pytorch_model_fsdp_{number}")
        if store.exists(store.join(divided_folder, ".metadata")):
            return distributed_weights(store, divided_folder)
        suffix = f"_{number}" if number else ""
        for stem, ending in (*KINDS, ("pytorch_model_fsdp", "bin")):
            path = os.path.join(folder, f"{stem}{suffix}.{ending}")
            if os.path.isfile(path):
                has_usual_name = number == 0 and stem != "pytorch_model_fsdp"
                return None if has_usual_name else weights_in_files([path])
        return None


CHECKPOINT_FORMAT = AccelerateFormat()
