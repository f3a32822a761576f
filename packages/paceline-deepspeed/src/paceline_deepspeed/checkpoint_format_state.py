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

from paceline.checkpoint.format.checkpoint_format import RunNames
from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
from paceline.checkpoint.state.optimizer_state import OptimizerState
from paceline.checkpoint.state.train_state import TrainState
from paceline.checkpoint.weights.model import saved_names_of
from paceline.checkpoint.weights.sources import TensorWeights, Weights
from paceline_deepspeed.checkpoint_format_files import Pieces
from paceline_deepspeed.checkpoint_format_universal import open_folder
from paceline_deepspeed.module_state import COUNTERS, KEY
from paceline_doors.state_translation import StateTranslation

_KINDS = frozenset({"models", "optimizers", "schedulers", "scaler"})
_States = tuple[dict[str, Any], list[list[str]]]  # the state of each parameter, and the parameters of each group


class DeepSpeedReader:
    """Reads one folder for one rank; each reads the same.

    Args:
        folder: DeepSpeed's `SAVE_DIR/TAG`.
        state: of this run.
        names: of all ranks.
    """

    def __init__(self, folder: str, state: TrainState, names: RunNames) -> None:
        self._folder = folder
        self._saved = open_folder(folder)
        self._names = names
        self._optimizers = state.optimizer_states()
        self._translation = StateTranslation(state, _KINDS, names)

    def read(self) -> OpenCheckpoint:
        """Reads the folder."""
        translation = self._translation
        saved = self._saved
        run = translation.state
        # From stage 1 on the weights that were read are in full precision already (`DeepSpeedFolder.weights`).
        exact = {}
        if saved.stage == 0:
            exact = self._full_precision()
        translation.add_model("model", saved.weights, tied=saved.aliases, exact=exact)
        if run.optimizers:
            # DeepSpeed has one optimizer: it is this run's first.
            name = next(iter(self._optimizers))
            self._add_optimizer(name, self._optimizers[name])
        self._add_scheduler()
        if saved.dynamic_scale is not None:
            scaler_state = {} if run.scaler is None else run.scaler.state_dict()
            translation.set("scaler", {**scaler_state, **_scaler_state(saved.dynamic_scale)})
        self._set_counters()
        translation.note("random streams and the place in the data: a folder of DeepSpeed's holds none")
        return translation.opened()

    def _full_precision(self) -> dict[str, tuple[Weights, str]]:
        """Parameters in full precision, which stage 0 keeps beside those of the model, by their number."""
        optimizer = self._saved.first["optimizer"] or {}
        tensors: list[Tensor] = []
        for group in optimizer.get("fp32_groups") or ():
            tensors += [tensor.detach() for tensor in group]
        order = next(iter(self._names.parameters.values()), [])
        if not tensors or len(tensors) != len(order):
            return {}
        names = [name for name, _ in order]
        tensors_by_name = dict(zip(names, tensors, strict=True))
        weights = TensorWeights(tensors_by_name)
        return {name: (weights, name) for name in names}

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def _add_optimizer(self, name: str, optimizer_state: OptimizerState) -> None:
        saved = self._saved.optimizer
        if self._saved.shapes is None:
            states, members = self._by_number(name, saved)
        else:
            states, members = self._by_name(name)
        # DeepSpeed's own optimizers keep keys in a group that torch's do not know.
        groups_here = optimizer_state.optimizer.param_groups
        known_keys: set[str] = set()
        if groups_here:
            known_keys.update(groups_here[0])
        groups = []
        for group in saved["param_groups"]:
            groups.append({key: value for key, value in group.items() if key in known_keys})
        self._translation.add_optimizer(name, optimizer_state, groups, members, states)

    def _by_number(self, optimizer: str, saved: dict[str, Any]) -> _States:
        """Reads the states of stage 0, where torch's own state was saved."""
        keys: list[Any] = []
        for group in saved["param_groups"]:
            keys += group["params"]
        why = "DeepSpeed's stage 0 numbers parameters in their order, and keeps no names"
        names = self._translation.parameter_names(optimizer, keys, self._folder, why)
        states = {}
        for key, state in saved["state"].items():
            states[names[key]] = self._translation.encode(_plain(state), f"optimizers/{optimizer}/{names[key]}")
        return states, [[names[key] for key in group["params"]] for group in saved["param_groups"]]

    def _by_name(self, optimizer: str) -> _States:
        """Reads the states of stages 1 to 3: pieces of flat vectors, which stay in their files until they are fetched."""
        assert self._saved.shapes is not None
        moments, other_states = self._saved.moments()
        trained = Pieces(self._saved.trained, self._saved.master)
        # DeepSpeed's names are those of the model that it was given, which may lie in other wrappers here.
        saved_names = saved_names_of(trained, self._names.tensors.get("model", set()))
        names = {saved_name: name for name, saved_name in saved_names.items()}
        states = {}
        for saved_name in self._saved.trained:
            name = names[saved_name]
            path = f"optimizers/{optimizer}/{name}"
            state = self._translation.encode(_plain(other_states[saved_name]), path)
            for moment, pieces in moments.items():
                state[moment] = self._translation.tensor(f"{path}/{moment}", pieces, saved_name)
            states[name] = state
        return states, [[names[saved_name] for saved_name in group] for group in self._saved.shapes]

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _add_scheduler(self) -> None:
        saved = self._saved.first.get("lr_scheduler")
        schedulers = self._translation.state.plain["schedulers"]
        if saved is not None and len(schedulers) == 1:
            ((name, scheduler),) = schedulers.items()
            self._translation.add("schedulers", name, scheduler, saved)
            return
        if schedulers and saved is None:
            self._translation.note("scheduler: the folder holds the state of none, so this run's goes on as it is")
        self._translation.leave_out("schedulers")

    def _set_counters(self) -> None:
        first = self._saved.first
        run = self._translation.state.run.state_dict()
        counters = {name: first.get(name, 0) for name in COUNTERS}
        # As the engine's `save_checkpoint` keeps them in a checkpoint of ours.
        engine_state = {
            "counters": counters,
            "lr_scheduler": first.get("lr_scheduler"),
            "client_state": self._saved.client_state,
        }
        # DeepSpeed counts steps that were skipped for an overflow too, and the run here does not.
        step = counters["global_steps"] - counters["skipped_steps"]
        extra = {**run["extra"], KEY: engine_state}
        self._translation.set("run", {**run, "step": step, "micro_step": 0, "extra": extra})


def _scaler_state(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what DeepSpeed's attributes of a loss scale are in the state of ours."""
    state: dict[str, Any] = {"scale": float(theirs["cur_scale"])}
    if {"cur_iter", "last_overflow_iter", "scale_window"} <= theirs.keys():
        # DeepSpeed grows after each `scale_window` good steps that follow the first; ours counts these, from -1.
        num_good = theirs["cur_iter"] - theirs["last_overflow_iter"] - 1
        state["_growth_tracker"] = num_good - 1
        if num_good > theirs["scale_window"]:
            state["_growth_tracker"] = (num_good - 1) % theirs["scale_window"]
    if "cur_hysteresis" in theirs:
        state["_hysteresis"] = theirs["cur_hysteresis"]
    return state


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Detaches a parameter's state, and turns a count of steps into the form that torch keeps."""
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            value = value.detach()
        plain[key] = value
    # torch's optimizers add to the count in place, which a number does not allow.
    if isinstance(plain.get("step"), int):
        plain["step"] = torch.tensor(float(plain["step"]))
    return plain
