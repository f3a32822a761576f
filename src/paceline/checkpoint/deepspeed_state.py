"""What `TrainState` needs to compare and take a checkpoint of DeepSpeed's, at any width and under any plan.

Models, the optimizer with its moments, counters, the scheduler's state and the loss scale; DeepSpeed keeps no random
streams, no place in the data and no open accumulation window. Its parameters go by name from stage 1 on; at stage 0 its
optimizer only numbers them, and those of this run are taken in their order.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline.checkpoint.codec import Encoder
from paceline.checkpoint.deepspeed import DeepSpeedFolder, Pieces
from paceline.checkpoint.model import alike, called
from paceline.checkpoint.module_state import ModuleState
from paceline.checkpoint.optimizer_state import OptimizerState
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.translated import Translated, hyper_parameters
from paceline.checkpoint.weights import TensorWeights, Weights

_KINDS = frozenset({"models", "optimizers", "schedulers", "scaler"})


class DeepSpeedReader:
    """Reads one folder for one rank.

    Args:
        folder: DeepSpeed's `SAVE_DIR/TAG`.
        state: of this run.
        rank: of this process; readers of all libraries are made alike, and this one reads the same on each.
        names: of all tensors of each model, of all ranks.
        orders: for each optimizer, its parameters and their groups in their order, of all ranks.
    """

    def __init__(
        self,
        folder: str,
        state: TrainState,
        rank: int,
        names: Mapping[str, set[str]],
        orders: Mapping[str, list[tuple[str, int]]],
    ) -> None:
        self._folder, self._there = folder, DeepSpeedFolder(folder)
        self._names, self._orders = names, orders
        self._encoder = Encoder()
        kept = copy.copy(state)
        kept.narrow(_KINDS if state._only is None else _KINDS & state._only)
        self._found = Translated(
            kept, {kind: {} for kind in ("optimizers", "schedulers", "loaders", "custom", "window")}
        )

    def read(self, optimizers: Mapping[str, OptimizerState]) -> Translated:
        """All of it."""
        found, state = self._found, self._found.state
        self._master = self._of_stage_0() if self._there.stage == 0 else {}
        found.saved["models"] = {"model": self._model(state)}
        for name in list(optimizers)[:1] if state.optimizers else ():
            found.saved["optimizers"][name] = self._optimizer(name, optimizers[name])
        self._scheduler(state)
        scale = self._there.scale
        same = {} if state.scaler is None else state.scaler.state_dict()
        found.saved["scaler"] = None if scale is None else self._encoder.encode({**same, "scale": scale}, "scaler")
        first = self._there.first
        counters = {name: first.get(name, 0) for name in ("global_steps", "global_samples", "skipped_steps")}
        own = {
            "counters": counters,
            "lr_scheduler": first.get("lr_scheduler"),
            "client_state": self._there.client_state,
        }
        run = {**state.run.state_dict(), "step": counters["global_steps"] - counters["skipped_steps"]}
        run = {**run, "micro_step": 0, "extra": {**run["extra"], "deepspeed": own}}
        found.saved["run"] = self._encoder.encode(run, "run")
        found.saved["rng"] = {}
        found.notes.append("random streams and the place in the data: a folder of DeepSpeed's holds none")
        if self._encoder.problems:
            raise CheckpointError.of(self._encoder.problems)
        kept = TensorWeights(self._encoder.tensors)
        found.sources |= {path: (kept, path) for path in self._encoder.tensors}
        return found

    # -- model -------------------------------------------------------------------------------------------------------

    def _model(self, state: TrainState) -> dict[str, Any]:
        weights = self._there.weights
        there = called(weights, self._names.get("model", set()))
        exact = {name: (self._master.get(name, (weights, key))) for name, key in there.items()}
        self._found.sources |= {f"models/model/{name}": source for name, source in exact.items()}
        aliases = {name: first for name, first in self._there.aliases.items() if name not in there}
        if "model" in state.models:
            known = ModuleState.of(state.models["model"])
            for own in known.raw:
                present = [each for each in alike(own, known.aliases, state.tied.get("model", {})) if each in there]
                present += [first for name, first in aliases.items() if name == own]
                if own not in there and present:
                    aliases[own] = present[0]
        return {"aliases": aliases, "values": {}}

    def _of_stage_0(self) -> dict[str, tuple[Weights, str]]:
        """Parameters in full precision, which stage 0 keeps beside those of the model, by their number."""
        groups = (self._there.first["optimizer"] or {}).get("fp32_groups")
        order = next(iter(self._orders.values()), [])
        tensors = [tensor for group in groups or () for tensor in group]
        if not tensors or len(tensors) != len(order):
            return {}
        kept = TensorWeights({name: t.detach() for (name, _), t in zip(order, tensors, strict=True)})
        return {name: (kept, name) for name, _ in order}

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def _optimizer(self, name: str, here: OptimizerState) -> dict[str, Any]:
        raw, prefix = self._there.optimizer, f"optimizers/{name}"
        if self._there.shapes is None:
            states, members = self._numbered(name, raw, prefix)
        else:
            states, members = self._named(prefix)
        known = set(here.optimizer.param_groups[0]) if here.optimizer.param_groups else set()
        groups = [{key: value for key, value in group.items() if key in known} for group in raw["param_groups"]]
        return {
            "type": type(here.optimizer).__qualname__,
            "groups": self._encoder.items(hyper_parameters(here, groups), f"{prefix}/groups"),
            "members": members,
            "state": states,
            "other": {},
            "extra": {},
        }

    def _numbered(self, name: str, raw: dict[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, int]]:
        """Stage 0: torch's own state."""
        order = self._orders.get(name, [])
        keys = [key for group in raw["param_groups"] for key in group["params"]]
        if len(keys) != len(order):
            raise CheckpointError(
                "checkpoint-groups",
                f"optimizer {name!r} has {len(order)} parameters, but {len(keys)} in {self._folder}.",
                why="DeepSpeed's stage 0 numbers parameters in their order, and keeps no names",
                fix="build the optimizer of the same parameters, in the same groups and order, as when it was saved",
            )
        own = {key: called for key, (called, _) in zip(keys, order, strict=True)}
        states = {
            own[key]: self._encoder.encode(_plain(state), f"{prefix}/{own[key]}") for key, state in raw["state"].items()
        }
        members = {own[key]: at for at, group in enumerate(raw["param_groups"]) for key in group["params"]}
        return states, members

    def _named(self, prefix: str) -> tuple[dict[str, Any], dict[str, int]]:
        """Stages 1 to 3: flat vectors, which stay in their files."""
        assert self._there.shapes is not None
        pieces, others = self._there.moments()
        there = called(Pieces(self._there.trained, self._there.master), self._names.get("model", set()))
        own = {key: name for name, key in there.items()}
        states = {}
        for key in self._there.trained:
            path = f"{prefix}/{own[key]}"
            states[own[key]] = {
                **self._encoder.encode(_plain(others[key]), path),
                **{moment: {"$tensor": f"{path}/{moment}"} for moment in pieces},
            }
            self._found.sources |= {f"{path}/{moment}": (held, key) for moment, held in pieces.items()}
        members = {own[key]: at for at, group in enumerate(self._there.shapes) for key in group}
        return states, members

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _scheduler(self, state: TrainState) -> None:
        told, here = self._there.first.get("lr_scheduler"), state.plain["schedulers"]
        if told is None or len(here) != 1:
            state.plain["schedulers"] = {}
            if here and told is None:
                self._found.notes.append(
                    "scheduler: the folder holds the state of none, so this run's goes on as it is"
                )
            return
        ((name, scheduler),) = here.items()
        saved = {"type": type(scheduler).__qualname__, "state": self._encoder.encode(told, f"schedulers/{name}")}
        self._found.saved["schedulers"] = {name: saved}


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without gradients' history; a count of steps as torch keeps it."""
    found = {key: value.detach() if isinstance(value, Tensor) else value for key, value in state.items()}
    if isinstance(found.get("step"), int):
        found["step"] = torch.tensor(float(found["step"]))
    return found
