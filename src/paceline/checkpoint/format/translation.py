"""`OpenCheckpoint`, what a load compares and reads; `Translation` makes one of another library's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.checkpoint_format import RunNames
from paceline.checkpoint.state.codec import Encoder
from paceline.checkpoint.state.module_state import ModuleState
from paceline.checkpoint.state.optimizer_state import OptimizerState
from paceline.checkpoint.state.train_state import KINDS, Shapes, TrainState
from paceline.checkpoint.weights.model import names_of_same_tensor, saved_names_of
from paceline.checkpoint.weights.sources import TensorWeights, Weights, fill
from paceline.world.parts import part_of_whole
from paceline.world.sharded import local

# How a step is computed, not what: the run at hand decides.
_MANNERS = ("fused", "foreach", "capturable")


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint of which everything but the tensors has been read.

    Attributes:
        state: what is loaded into: this run's, without what the checkpoint cannot give.
        saved: what the checkpoint holds, as `state.json` of ours would.
        shapes: shape and dtype of each tensor, by path.
        read: reads into tensors, by path; each is whole, or this rank's part of a whole.
        notes: what will not be exactly as it was, in words.
    """

    state: TrainState
    saved: dict[str, Any]
    shapes: Shapes
    read: Callable[[dict[str, Tensor]], None]
    notes: tuple[str, ...] = ()


class Translation:
    """Says in the words of ours what another library's checkpoint holds.

    Tensors stay where they lie until a rank reads its part of them.

    Args:
        state: of this run.
        kinds: what such a folder can give, of models, optimizers, schedulers, loaders, custom, scaler, rng and window; the
            rest of the run goes on as it is.
        names: of all ranks.

    Attributes:
        state: what is loaded into.
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
        """Says that the folder cannot give one of `kinds` after all: this run's goes on as it is."""
        self.state = self.state.narrowed(KINDS - {kind})

    def note(self, text: str) -> None:
        """Remembers what will not be exactly as it was."""
        self._notes.append(text)

    def tensor(self, path: str, weights: Weights, name: str) -> dict[str, str]:
        """Says where the tensor of a path lies; returns the JSON that stands for it."""
        self._sources[path] = (weights, name)
        return {"$tensor": path}

    def encode(self, value: object, path: str) -> Any:
        """JSON for a value with the tensors in it, which are kept.

        A value that no checkpoint can hold is refused by `opened`.
        """
        return self._encoder.encode(value, path)

    def set(self, kind: str, value: object) -> None:
        """Gives what there is one of: "run" or "scaler"."""
        self._saved[kind] = self.encode(value, kind)

    def add(self, kind: str, name: str, here: object, value: object) -> None:
        """Gives the state of a scheduler or a registered object; `here` is this run's, if it has one."""
        self._saved[kind][name] = {"type": type(here).__qualname__, "state": self.encode(value, f"{kind}/{name}")}

    def add_streams(self, rank: int, streams: object) -> None:
        """Gives the random streams of a rank; None where it had some that this rank need not know."""
        self._saved["rng"][str(rank)] = self.encode(streams, f"rng/{rank}")

    def add_model(
        self,
        name: str,
        weights: Weights,
        *,
        tied: Mapping[str, str] | None = None,
        exact: Mapping[str, tuple[Weights, str]] | None = None,
    ) -> None:
        """Gives a model's weights; names that wrappers add are understood.

        Args:
            name: ours: "model", "model_1".
            weights: the tensors.
            tied: other names of tied tensors in the folder -> the first.
            exact: tensors, by our names, that are kept elsewhere in a better precision.
        """
        saved_names = saved_names_of(weights, self.names.tensors.get(name, set()))
        better = exact or {}
        for own, key in saved_names.items():
            self._sources[f"models/{name}/{own}"] = better.get(own, (weights, key))
        first_names = tied or {}
        aliases = {other: first for other, first in first_names.items() if other not in saved_names}
        if name in self.state.models:
            module = ModuleState.of(self.state.models[name])
            for own in module.raw:
                if own in saved_names:
                    continue
                others = names_of_same_tensor(own, module.aliases, self.state.tied.get(name, {}))
                first = next((other for other in others if other in saved_names), None)
                if first is not None:
                    aliases[own] = first
        self._saved["models"][name] = {"aliases": aliases, "values": {}}

    def add_optimizer(
        self,
        name: str,
        here: OptimizerState | None,
        groups: list[dict[str, Any]],
        members: Mapping[str, int],
        states: Mapping[str, Any],
    ) -> None:
        """Gives an optimizer's state.

        Args:
            name: ours: "optimizer", "optimizer_1".
            here: this run's, if it has one.
            groups: hyper-parameters of each group as they were saved; what is not there is as it is here.
            members: the number of the group of each parameter.
            states: JSON of each parameter's state, from `encode` and `tensor`.
        """
        hyper = []
        for number, group in enumerate(groups):
            own: dict[str, Any] = {}
            if here is not None and number < len(here.optimizer.param_groups):
                own = here.optimizer.param_groups[number]
            merged = {**own, **{key: value for key, value in group.items() if key not in _MANNERS}}
            merged.pop("params", None)
            hyper.append(merged)
        self._saved["optimizers"][name] = {
            "type": "" if here is None else type(here.optimizer).__qualname__,
            "groups": self._encoder.items(hyper, f"optimizers/{name}/groups"),
            "members": dict(members),
            "state": dict(states),
            "other": {},
            "extra": {},
        }

    def number(self, value: object) -> float | None:
        """The number that a JSON value is or, as a tensor of one element, stands for; None for any other."""
        path = value.get("$tensor") if isinstance(value, dict) else None
        if path in self._encoder.tensors:
            return float(self._encoder.tensors[path])
        if path is not None:
            weights, name = self._sources[path]
            return float(weights.read(name, ()))
        return value if isinstance(value, (int, float)) else None

    def opened(self) -> OpenCheckpoint:
        """What was said, all of it.

        Raises:
            CheckpointError: `checkpoint-value`, for each value that a checkpoint cannot hold.
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
