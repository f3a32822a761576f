"""What `TrainState` needs to compare and take a checkpoint of DeepSpeed's, at any width and under any plan.

Models, the optimizer with its moments, counters, the scheduler's state and the loss scale; DeepSpeed keeps no random
streams, no place in the data and no open accumulation window. Its parameters go by name from stage 1 on; at stage 0 its
optimizer only numbers them, and those of this run are taken in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline.checkpoint.format.checkpoint_format import RunNames
from paceline.checkpoint.format.translation import OpenCheckpoint, Translation
from paceline.checkpoint.state.optimizer_state import OptimizerState
from paceline.checkpoint.state.train_state import TrainState
from paceline.checkpoint.weights.model import saved_names_of
from paceline.checkpoint.weights.sources import TensorWeights, Weights
from paceline.compat.deepspeed.checkpoint_format_files import DeepSpeedFolder, Pieces

_KINDS = frozenset({"models", "optimizers", "schedulers", "scaler"})
_States = tuple[dict[str, Any], dict[str, int]]  # of each parameter: its state, and the number of its group


class DeepSpeedReader:
    """Reads one folder for one rank; each reads the same.

    Args:
        folder: DeepSpeed's `SAVE_DIR/TAG`.
        state: of this run.
        names: of all ranks.
    """

    def __init__(self, folder: str, state: TrainState, names: RunNames) -> None:
        self._folder = folder
        self._saved = DeepSpeedFolder(folder)
        self._names = names
        self._optimizers = state.optimizer_states()
        self._translation = Translation(state, _KINDS, names)

    def read(self) -> OpenCheckpoint:
        """All of it."""
        translation, saved, run = self._translation, self._saved, self._translation.state
        exact = self._full_precision() if saved.stage == 0 else {}
        translation.add_model("model", saved.weights, tied=saved.aliases, exact=exact)
        if run.optimizers:
            # DeepSpeed has one optimizer: it is this run's first.
            name = next(iter(self._optimizers))
            self._add_optimizer(name, self._optimizers[name])
        self._add_scheduler()
        if saved.scale is not None:
            scaler = {} if run.scaler is None else run.scaler.state_dict()
            translation.set("scaler", {**scaler, "scale": saved.scale})
        self._set_counters()
        translation.note("random streams and the place in the data: a folder of DeepSpeed's holds none")
        return translation.opened()

    def _full_precision(self) -> dict[str, tuple[Weights, str]]:
        """Parameters in full precision, which stage 0 keeps beside those of the model, by their number."""
        groups = (self._saved.first["optimizer"] or {}).get("fp32_groups") or ()
        tensors = [tensor.detach() for group in groups for tensor in group]
        order = next(iter(self._names.parameters.values()), [])
        if not tensors or len(tensors) != len(order):
            return {}
        names = [name for name, _ in order]
        weights = TensorWeights(dict(zip(names, tensors, strict=True)))
        return {name: (weights, name) for name in names}

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def _add_optimizer(self, name: str, here: OptimizerState) -> None:
        raw = self._saved.optimizer
        states, members = self._numbered(name, raw) if self._saved.shapes is None else self._named(name)
        # DeepSpeed's own optimizers keep keys in a group that torch's do not know.
        own_keys = here.optimizer.param_groups[0].keys() if here.optimizer.param_groups else set()
        groups = []
        for group in raw["param_groups"]:
            groups.append({key: value for key, value in group.items() if key in own_keys})
        self._translation.add_optimizer(name, here, groups, members, states)

    def _numbered(self, optimizer: str, raw: dict[str, Any]) -> _States:
        """Stage 0: torch's own state."""
        order = self._names.parameters.get(optimizer, [])
        keys = [key for group in raw["param_groups"] for key in group["params"]]
        if len(keys) != len(order):
            raise CheckpointError(
                "checkpoint-groups",
                f"optimizer {optimizer!r} has {len(order)} parameters, but {len(keys)} in {self._folder}.",
                why="DeepSpeed's stage 0 numbers parameters in their order, and keeps no names",
                fix="build the optimizer of the same parameters, in the same groups and order, as when it was saved",
            )
        own = {key: name for key, (name, _) in zip(keys, order, strict=True)}
        states = {}
        for key, state in raw["state"].items():
            states[own[key]] = self._translation.encode(_plain(state), f"optimizers/{optimizer}/{own[key]}")
        members = {}
        for number, group in enumerate(raw["param_groups"]):
            members |= dict.fromkeys([own[key] for key in group["params"]], number)
        return states, members

    def _named(self, optimizer: str) -> _States:
        """Stages 1 to 3: flat vectors, which stay in their files."""
        assert self._saved.shapes is not None
        moments, others = self._saved.moments()
        trained = Pieces(self._saved.trained, self._saved.master)
        saved_names = saved_names_of(trained, self._names.tensors.get("model", set()))
        own = {key: name for name, key in saved_names.items()}
        states = {}
        for key in self._saved.trained:
            path = f"optimizers/{optimizer}/{own[key]}"
            state = self._translation.encode(_plain(others[key]), path)
            for moment, pieces in moments.items():
                state[moment] = self._translation.tensor(f"{path}/{moment}", pieces, key)
            states[own[key]] = state
        members = {}
        for number, group in enumerate(self._saved.shapes):
            members |= dict.fromkeys([own[key] for key in group], number)
        return states, members

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _add_scheduler(self) -> None:
        saved, here = self._saved.first.get("lr_scheduler"), self._translation.state.plain["schedulers"]
        if saved is not None and len(here) == 1:
            ((name, scheduler),) = here.items()
            self._translation.add("schedulers", name, scheduler, saved)
            return
        if here and saved is None:
            self._translation.note("scheduler: the folder holds the state of none, so this run's goes on as it is")
        self._translation.leave_out("schedulers")

    def _set_counters(self) -> None:
        first, run = self._saved.first, self._translation.state.run.state_dict()
        counters = {name: first.get(name, 0) for name in ("global_steps", "global_samples", "skipped_steps")}
        own = {
            "counters": counters,
            "lr_scheduler": first.get("lr_scheduler"),
            "client_state": self._saved.client_state,
        }
        step = counters["global_steps"] - counters["skipped_steps"]
        extra = {**run["extra"], "deepspeed": own}
        self._translation.set("run", {**run, "step": step, "micro_step": 0, "extra": extra})


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state without gradients' history; a count of steps as torch keeps it."""
    plain = {key: value.detach() if isinstance(value, Tensor) else value for key, value in state.items()}
    if isinstance(plain.get("step"), int):
        plain["step"] = torch.tensor(float(plain["step"]))
    return plain
