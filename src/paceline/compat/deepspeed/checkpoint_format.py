"""DeepSpeed's checkpoint folders, as one of the formats that a run goes on from."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from paceline.checkpoint.format.checkpoint_format import CheckpointFormat, RunNames, Summary
from paceline.checkpoint.store import Store, confined

if TYPE_CHECKING:
    from paceline.checkpoint.format.translation import OpenCheckpoint
    from paceline.checkpoint.state.train_state import TrainState
    from paceline.checkpoint.weights.sources import Weights

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_OPTIMIZER_FILE_END = "_optim_states.pt"
_STEP = re.compile(r"global_step(\d+)")
_LONGEST_TAG = 4096  # bytes of a path


class DeepSpeedFormat(CheckpointFormat):
    """What DeepSpeed's `save_checkpoint` writes, of every ZeRO stage."""

    name = "deepspeed"

    def recognises(self, store: Store, folder: str) -> bool:
        return any(_MODEL_FILE.fullmatch(name) for name in _names(folder))

    def newest(self, store: Store, folder: str) -> str | None:
        """The checkpoint that the file `latest` names."""
        path = os.path.join(folder, "latest")
        if "://" in folder or not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            return confined(store, folder, tag_in(file.read(_LONGEST_TAG)), path)

    def summary(self, store: Store, folder: str) -> Summary:
        """The step that an automatic name tells, and how many ranks wrote files of their optimizer."""
        step = _STEP.fullmatch(os.path.basename(folder))
        ranks = sum(name.endswith(_OPTIMIZER_FILE_END) for name in _names(folder))
        return Summary(step=int(step[1]) if step else None, world_size=ranks or None)

    def read(self, store: Store, folder: str, state: TrainState, names: RunNames) -> OpenCheckpoint:
        from paceline.compat.deepspeed.checkpoint_format_state import DeepSpeedReader

        return DeepSpeedReader(folder, state, names).read()

    def weights(self, store: Store, folder: str, model: str) -> Weights | None:
        """The whole model, in the precision in which its optimizer keeps it."""
        from paceline.compat.deepspeed.checkpoint_format_files import DeepSpeedFolder

        return DeepSpeedFolder(folder).weights if self.recognises(store, folder) else None


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def tag_in(content: bytes) -> str:
    """What a file `latest` names; bytes that are no text become marks that no folder's name has."""
    return content.decode("utf-8", "replace").strip()


CHECKPOINT_FORMAT = DeepSpeedFormat()
