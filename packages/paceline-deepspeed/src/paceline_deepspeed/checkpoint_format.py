"""DeepSpeed's checkpoint folders, as one of the formats that a run goes on from."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from paceline.checkpoint.format.checkpoint_format import CheckpointFormat, RunNames, Summary
from paceline.checkpoint.store import Store, confined

if TYPE_CHECKING:
    from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
    from paceline.checkpoint.state.train_state import TrainState
    from paceline.checkpoint.weights.sources import Weights
    from paceline_deepspeed.checkpoint_format_files import DeepSpeedFolder

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_OPTIMIZER_FILE_END = "_optim_states.pt"
_STEP = re.compile(r"global_step(\d+)")
LATEST = ("latest", "latest_universal")
_LONGEST_TAG = 4096  # bytes of a path


class DeepSpeedFormat(CheckpointFormat):
    """The folders that DeepSpeed's `save_checkpoint` writes, of every ZeRO stage, and what `ds_to_universal` makes of them."""

    name = "deepspeed"

    def recognises(self, store: Store, folder: str) -> bool:
        return any(_MODEL_FILE.fullmatch(name) for name in _names(folder))

    def newest(self, store: Store, folder: str) -> str | None:
        """Returns the checkpoint that the file `latest` names, or `latest_universal`, where that is the only one."""
        if "://" in folder:
            return None
        for name in LATEST:
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    return confined(store, folder, tag_in(file.read(_LONGEST_TAG)), path)
        return None

    def summary(self, store: Store, folder: str) -> Summary:
        """Tells the step in an automatic name, and how many ranks wrote files of their optimizer."""
        step: int | None = None
        match = _STEP.fullmatch(os.path.basename(folder))
        if match:
            step = int(match[1])
        ranks = sum(name.endswith(_OPTIMIZER_FILE_END) for name in _names(folder))
        return Summary(step=step, world_size=ranks or None)  # stage 0 writes no such file

    def read(self, store: Store, folder: str, state: TrainState, names: RunNames) -> OpenCheckpoint:
        from paceline_deepspeed.checkpoint_format_state import DeepSpeedReader

        return DeepSpeedReader(folder, state, names).read()

    def weights(self, store: Store, folder: str, model: str) -> Weights | None:
        """Returns the whole model, in the precision in which its optimizer keeps it."""
        if not self.recognises(store, folder):
            return None
        return _opened(folder).weights

    def tied_names(self, store: Store, folder: str) -> Mapping[str, str]:
        return _opened(folder).aliases

    def frozen_names(self, folder: str) -> Collection[str]:
        """Returns the names of the parameters that were not trained."""
        return frozenset(_opened(folder).first.get("frozen_param_shapes") or ())


def _opened(folder: str) -> DeepSpeedFolder:
    from paceline_deepspeed.checkpoint_format_universal import open_folder  # loads torch

    return open_folder(folder)


def _names(folder: str) -> list[str]:
    if not os.path.isdir(folder):  # such as an address of an object store
        return []
    return os.listdir(folder)


def tag_in(content: bytes) -> str:
    """Returns what a file `latest` names; bytes that are no text become marks that no folder's name has."""
    return content.decode("utf-8", "replace").strip()


CHECKPOINT_FORMAT = DeepSpeedFormat()
