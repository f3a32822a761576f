"""`OpenCheckpoint`: what a load compares with this run, and reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.checkpoint.state.train_state import Shapes, TrainState


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that has been read except for its tensors.

    Attributes:
        state: the state of this run that is loaded, without what the checkpoint does not have.
        saved: what the checkpoint holds, in the form of Paceline's `state.json`.
        shapes: shape and dtype of each tensor, by path.
        read: reads tensors in place, by path. Each is a whole tensor, or this rank's part of one.
        notes: one sentence for each thing that will not be exactly as it was.
    """

    state: TrainState
    saved: dict[str, Any]
    shapes: Shapes
    read: Callable[[dict[str, Tensor]], None]
    notes: tuple[str, ...] = ()
