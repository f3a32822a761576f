"""`StateTranslation` makes an `OpenCheckpoint` from the checkpoint of another library."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.checkpoint_format import RunNames
from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
from paceline.checkpoint.state.codec import Encoder
from paceline.checkpoint.state.module_state import ModuleState
from paceline.checkpoint.state.optimizer_state import OptimizerState
from paceline.checkpoint.state.train_state import KINDS, TrainState
from paceline.checkpoint.weights.model import names_of_same_tensor, saved_names_of
from paceline.checkpoint.weights.sources import TensorWeights, Weights, fill
from paceline.world.parts import part_of_whole
from paceline.world.sharded import local

# These choose an implementation of the step and do not change its result, so this run's own values are kept.
_IMPLEMENTATION = ("fused", "foreach", "capturable")


class StateTranslation:
    """Collects what the checkpoint of another library holds, in the form of Paceline's own.

    Tensors are not read here; a rank later reads its part of each.

    Args:
        state: the state of this run.
        kinds: the kinds of state that the folder has: of models, optimizers, schedulers, loaders, custom, scaler, rng and
            window. All other state of this run stays as it is.
        names: the names of all ranks.

    Attributes:
        state: the state that is loaded.
    """

    def __init__(self, state: TrainState, kinds: Collection[str], names: RunNames) -> None:
        self.state = state.narrowed(kinds)
        self.names = names
        self._encoder = Encoder()
        self._saved: dict[str, Any] = {kind: {} for kind in KINDS}
        self._saved["scaler"] = None
        self._sources: dict[str, tuple[Weights, str]] = {}
        self._notes: list[str] = []

    def leave_out(self, kind: str) -> None:
        """Removes one of `kinds`, because the folder does not have it after all. That state of this run stays as it is."""
        self.state = self.state.narrowed(KINDS - {kind})

    def note(self, text: str) -> None:
        """Adds a note about something that will not be exactly as it was."""
        self._notes.append(text)

    def parameter_names(self, optimizer: str, keys: Sequence[Any], folder: str, why: str) -> dict[Any, str]:
        """Returns the names of this run's parameters by the keys of a saved state that has them in order, without names.

        Raises:
            CheckpointError: `checkpoint-groups` with this `why`, if there are more or fewer keys than parameters.
        """
        order = self.names.parameters.get(optimizer, [])
        if len(keys) != len(order):
            raise CheckpointError(
                "checkpoint-groups",
                f"optimizer {optimizer!r} has {len(order)} parameters, but {len(keys)} in {folder}.",
                why=why,
                fix="build the optimizer of the same parameters, in the same groups and order, as when it was saved",
            )
        return {key: name for key, (name, _) in zip(keys, order, strict=True)}

    def tensor(self, path: str, weights: Weights, name: str) -> dict[str, str]:
        """Records where the tensor of a path is stored, and returns the JSON that refers to it."""
        self._sources[path] = (weights, name)
        return {"$tensor": path}

    def encode(self, value: object, path: str) -> Any:
        """Returns the JSON of a value, and keeps the tensors in it.

        If the value cannot be in a checkpoint, `opened` raises the error.
        """
        return self._encoder.encode(value, path)

    def set(self, kind: str, value: object) -> None:
        """Adds the state of "run" or "scaler"."""
        self._saved[kind] = self.encode(value, kind)

    def add(self, kind: str, name: str, here: object, value: object) -> None:
        """Adds the state of a scheduler or a registered object; `here` is the object of this run, if it has one."""
        state = self.encode(value, f"{kind}/{name}")
        self._saved[kind][name] = {"type": type(here).__qualname__, "state": state}

    def add_streams(self, rank: int, streams: object) -> None:
        """Adds the random streams of a rank; None if the rank has some, but this rank does not need them."""
        self._saved["rng"][str(rank)] = self.encode(streams, f"rng/{rank}")

    def add_model(
        self,
        name: str,
        weights: Weights,
        *,
        tied: Mapping[str, str] | None = None,
        exact: Mapping[str, tuple[Weights, str]] | None = None,
    ) -> None:
        """Adds the weights of a model. Their names may have the prefixes of wrappers.

        Args:
            name: Paceline's name for the model: "model", "model_1".
            weights: the tensors.
            tied: other names of tied tensors in the folder -> the first name.
            exact: tensors that are also stored elsewhere in a higher precision, by their names in the model.
        """
        saved_names = saved_names_of(weights, self.names.tensors.get(name, set()))
        exact = exact or {}
        for own, key in saved_names.items():
            self._sources[f"models/{name}/{own}"] = exact.get(own, (weights, key))
        first_names = tied or {}
        # A tied tensor may lie in the folder under its first name only. A load then finds it through its alias.
        aliases = {other: first for other, first in first_names.items() if other not in saved_names}
        if name in self.state.models:
            module = ModuleState.of(self.state.models[name])
            for own in module.raw:
                if own in saved_names:
                    continue
                others = names_of_same_tensor(own, module.aliases, self.state.tied.get(name, {}))
                present = [other for other in others if other in saved_names]
                if present:
                    aliases[own] = present[0]
        self._saved["models"][name] = {"aliases": aliases, "values": {}}

    def add_optimizer(
        self,
        name: str,
        here: OptimizerState | None,
        groups: list[dict[str, Any]],
        members: Sequence[Iterable[str]],
        states: Mapping[str, Any],
        *,
        other: Mapping[Any, Any] = MappingProxyType({}),
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Adds the state of an optimizer.

        Args:
            name: Paceline's name for the optimizer: "optimizer", "optimizer_1".
            here: the optimizer of this run, if it has one.
            groups: the saved hyperparameters of each group. Those that are missing are taken from this run.
            members: the parameters of each group.
            states: the JSON of each parameter's state, from `encode` and `tensor`.
            other, extra: states that belong to no parameter, and what an optimizer's `state_dict` has besides.
        """
        hyper = []
        for number, group in enumerate(groups):
            own: dict[str, Any] = {}
            if here is not None and number < len(here.optimizer.param_groups):
                own = here.optimizer.param_groups[number]
            saved = {key: value for key, value in group.items() if key not in _IMPLEMENTATION}
            merged = {**own, **saved}
            merged.pop("params", None)
            hyper.append(merged)
        group_numbers: dict[str, int] = {}
        for number, parameters in enumerate(members):
            group_numbers.update(dict.fromkeys(parameters, number))
        self._saved["optimizers"][name] = {
            "type": "" if here is None else type(here.optimizer).__qualname__,
            "groups": self._encoder.items(hyper, f"optimizers/{name}/groups"),
            "members": group_numbers,
            "state": dict(states),
            "other": self.encode(dict(other), f"optimizers/{name}/other"),
            "extra": self.encode(dict(extra), f"optimizers/{name}/extra"),
        }

    def number(self, value: object) -> float | None:
        """Returns a JSON value as a number. It may refer to a tensor of one element; any other value gives None."""
        path = value.get("$tensor") if isinstance(value, dict) else None
        if path in self._encoder.tensors:
            return float(self._encoder.tensors[path])
        if path is not None:
            weights, name = self._sources[path]
            return float(weights.read(name, ()))
        return value if isinstance(value, (int, float)) else None

    def opened(self) -> OpenCheckpoint:
        """Returns the checkpoint with all that was added.

        Raises:
            CheckpointError: `checkpoint-value`, for each value that cannot be in a checkpoint.
        """
        if "run" not in self._saved:
            self.set("run", self.state.run.state_dict())
        if self._encoder.problems:
            raise CheckpointError.of(self._encoder.problems)
        in_memory = TensorWeights(self._encoder.tensors)
        sources: dict[str, tuple[Weights, str]] = dict(self._sources)
        for path in self._encoder.tensors:
            sources[path] = (in_memory, path)
        shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for path, (weights, name) in sources.items():
            entry = weights.entries[name]
            shapes[path] = torch.Size(entry.shape), entry.dtype

        def read(targets: Mapping[str, Tensor]) -> None:
            for path, target in targets.items():
                weights, name = sources[path]
                fill(local(target).detach(), part_of_whole(target), weights, name)

        return OpenCheckpoint(self.state, self._saved, shapes, read, tuple(self._notes))
