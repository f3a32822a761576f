"""`Translated`: a checkpoint of another library, said in the words of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.optimizer_state import OptimizerState
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.weights import Weights, fill
from paceline.world.parts import part_of_whole
from paceline.world.sharded import local

# How a step is computed, not what: the run at hand decides.
_MANNERS = ("fused", "foreach", "capturable")


@dataclass
class Translated:
    """A foreign checkpoint in the words of ours.

    Attributes:
        state: what to load into, without what the folder cannot give.
        saved: as `state.json` would hold it.
        sources: for each path of a tensor, the files and the name there.
        notes: what is not exactly as it was.
    """

    state: TrainState
    saved: dict[str, Any]
    sources: dict[str, tuple[Weights, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each tensor."""
        entries = {path: weights.entries[name] for path, (weights, name) in self.sources.items()}
        return {path: (torch.Size(entry.shape), entry.dtype) for path, entry in entries.items()}

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Reads into tensors, whole or divided, what belongs there."""
        for path, target in targets.items():
            weights, name = self.sources[path]
            fill(local(target).detach(), part_of_whole(target), weights, name)


def hyper_parameters(here: OptimizerState | None, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of each group: as saved, and as they are here where nothing was saved or the run at hand decides."""
    found = []
    for at, group in enumerate(groups):
        own = here.optimizer.param_groups[at] if here and at < len(here.optimizer.param_groups) else {}
        kept = {key: value for key, value in group.items() if key != "params" and key not in _MANNERS}
        found.append({**{key: value for key, value in own.items() if key != "params"}, **kept})
    return found
