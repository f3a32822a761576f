"""Universal checkpoints of DeepSpeed, which `ds_to_universal` makes of the folders of one width: whole tensors by name.

(zero_pp_rank_R_)mp_rank_00_model_states.pt   as in the folder that was converted
zero/PARAMETER/fp32.pt, exp_avg.pt, ...       the parameter in float32, and each state of its optimizer
zero/optimizer_state.pt                       what is the same for all parameters: groups, loss scale, counts
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline_deepspeed.checkpoint_format_files import DeepSpeedFolder, Pieces

_ZERO = "zero"
_WEIGHT = "fp32.pt"
_OPTIMIZER = "optimizer_state.pt"


def open_folder(folder: str) -> DeepSpeedFolder:
    """Opens one checkpoint of DeepSpeed's, universal or not.

    Raises:
        CheckpointError: `checkpoint-foreign`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    if os.path.isdir(os.path.join(folder, _ZERO)):
        return UniversalFolder(folder)
    return DeepSpeedFolder(folder)


class UniversalFolder(DeepSpeedFolder):
    """One universal checkpoint.

    Args:
        folder: what `ds_to_universal` wrote.

    Raises:
        CheckpointError: `checkpoint-foreign`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """

    def _check_ranks(self) -> None:
        if self.shapes is None:
            self._miss("the shapes of the parameters", "param_shapes is not in its *_model_states.pt")
        missing = []
        for name in self.trained:
            if not os.path.isfile(os.path.join(self.folder, _ZERO, name, _WEIGHT)):
                missing.append(name)
        if missing:
            self._miss(f"{len(missing)} parameters", f"{_ZERO}/{missing[0]}/{_WEIGHT} is not there")
        if not os.path.isfile(os.path.join(self.folder, _ZERO, _OPTIMIZER)):
            self._miss("the optimizer", f"{_ZERO}/{_OPTIMIZER} is not there")
        # The parts of frozen parameters are not converted; the ranks that saved them wrote a model's file each.
        if self.first.get("frozen_param_shapes") and self.stage == 3:
            self._check_files(self._models, self.first.get("dp_world_size", 1), "*_model_states.pt")

    def _miss(self, what: str, why: str) -> None:
        raise CheckpointError(
            "checkpoint-damaged",
            f"the universal checkpoint {self.folder} lacks {what}.",
            why=why,
            fix="convert the original folder again, or load that one: it needs no conversion here",
        )

    @cached_property
    def _state(self) -> dict[str, Any]:
        """What is the same for all parameters."""
        return dict(self._read(os.path.join(_ZERO, _OPTIMIZER)))

    @cached_property
    def _states(self) -> list[dict[str, Any]]:
        return [self._state]

    @cached_property
    def master(self) -> dict[str, list[Tensor]]:
        return {name: [self._tensor(name, _WEIGHT)] for name in self.trained}

    def _tensor(self, name: str, file: str) -> Tensor:
        """Reads one file of a parameter, as a flat vector."""
        value = self._read(os.path.join(_ZERO, name, file))
        # Stages 1 and 2 write a dictionary with the dimension in which parts were joined.
        if isinstance(value, Mapping):
            value = value["param"]
        tensor: Tensor = value.detach().reshape(-1)
        return tensor

    @property
    def optimizer(self) -> dict[str, Any]:
        return {"param_groups": self._state["param_groups"], "state": {}}

    def moments(self) -> tuple[dict[str, Pieces], dict[str, dict[str, Any]]]:
        # Stage 3 keeps counts of steps in the optimizer's state; the other stages write them beside each parameter.
        of_optimizer = self._state.get("optimizer_state_dict", {}).get("state", {})
        counts: dict[str, Any] = {}
        for key, value in next(iter(of_optimizer.values()), {}).items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                counts[key] = value
        parts: dict[str, dict[str, list[Tensor]]] = {}
        others: dict[str, dict[str, Any]] = {}
        for name, shape in self.trained.items():
            others[name] = dict(counts)
            for file in sorted(os.listdir(os.path.join(self.folder, _ZERO, name))):
                key = file.removesuffix(".pt")
                if file == _WEIGHT or key == file:
                    continue
                if key == "step":
                    others[name][key] = self._read(os.path.join(_ZERO, name, file))
                    continue
                vector = self._tensor(name, file)
                if vector.numel() != prod(shape):
                    self._miss(f"elements of {name}", f"{_ZERO}/{name}/{file} has {vector.numel()} of {prod(shape)}")
                parts.setdefault(key, {})[name] = [vector]
        return {key: Pieces(self.trained, vectors) for key, vectors in parts.items()}, others
