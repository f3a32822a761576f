"""accelerate's checkpoint folders, said in the words of our own: what `TrainState` needs to compare and take them.

    model.safetensors, pytorch_model.bin      weights of the first model (model_1..., pytorch_model_1... of the next)
    pytorch_model_fsdp.bin                    the same where FSDP divided it and the state was gathered
    pytorch_model_fsdp_0/, optimizer_0/       where it was not: torch's distributed format
    optimizer.bin, scheduler.bin              of the first; optimizer_1.bin, ... of the next
    scaler.pt, custom_checkpoint_0.pkl        the loss scale; registered objects
    random_states_0.pkl                       random streams, of each rank

Tensors are read where they lie, each rank its part. Nothing in a file is run: what holds more than tensors, arrays and
plain values is refused. A place in the data cannot be taken over, since it is a pickled sampler of accelerate's own.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from paceline.base.errors import CheckpointError
from paceline.checkpoint.agree import Peers, agreed, together
from paceline.checkpoint.codec import Encoder
from paceline.checkpoint.deepspeed import is_deepspeed
from paceline.checkpoint.deepspeed_state import DeepSpeedReader
from paceline.checkpoint.local import STORE
from paceline.checkpoint.model import alike, called, spelled
from paceline.checkpoint.module_state import ModuleState
from paceline.checkpoint.opening import open_weights
from paceline.checkpoint.optimizer_state import OptimizerState
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.translated import Translated, hyper_parameters
from paceline.checkpoint.weights import (
    DividedWeights,
    TensorWeights,
    Weights,
    load_mapped,
)

# What numpy's random state is pickled with: harmless, but unknown to torch's safe reader.
_ARRAYS = [numpy._core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, type(numpy.dtype(numpy.uint32))]


def is_foreign(folder: str) -> bool:
    """Whether a folder is a checkpoint of accelerate's or DeepSpeed's."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return "manifest.json" not in names and ("random_states_0.pkl" in names or is_deepspeed(folder))


def translate(folder: str, state: TrainState, peers: Peers) -> Translated:
    """Reads a folder of accelerate's or DeepSpeed's, but for its tensors; touches nothing.

    Ranks: all.

    Raises:
        CheckpointError: `checkpoint-damaged`, `checkpoint-unsafe`, `checkpoint-foreign`, `checkpoint-groups`.
    """
    own = {name: set(ModuleState.of(model).raw) for name, model in state.models.items()}
    optimizers = state.optimizer_states()
    order = {
        name: [(key, optimizer.groups[key]) for key in optimizer.parameters] for name, optimizer in optimizers.items()
    }
    ranks = together(peers, f"comparing {folder}", lambda: (own, order))
    names = {model: {key for theirs, _ in ranks for key in theirs[model]} for model in own}
    orders = {name: sorted(dict.fromkeys(pair for _, theirs in ranks for pair in theirs[name]), key=lambda pair: pair[1])
              for name in order}  # fmt: skip
    kind = DeepSpeedReader if is_deepspeed(folder) else _Reader
    return agreed(peers, f"reading {folder}", lambda: kind(folder, state, peers.rank, names, orders).read(optimizers))


class _Reader:
    """Reads one folder for one rank.

    Args:
        folder: accelerate's.
        state: of this run.
        rank: of this process.
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
        self._folder, self._rank = folder, rank
        self._names, self._orders = names, orders
        self._here = sorted(os.listdir(folder))
        self._encoder = Encoder()
        kept = copy.copy(state)
        kept.plain = {**state.plain, "loaders": {}}
        self._found = Translated(kept, {"loaders": {}})
        if state.plain["loaders"]:
            self._note("data position: loaders begin an epoch anew; `skip_first_batches` passes over what was seen")

    def _note(self, text: str) -> None:
        self._found.notes.append(text)

    def read(self, optimizers: Mapping[str, OptimizerState]) -> Translated:
        """All of it."""
        found, state = self._found, self._found.state
        found.saved["models"] = {name: self._model(name, at, state) for name, at in self._numbered("model", _MODELS)}
        found.saved["optimizers"] = {
            name: self._optimizer(name, at, optimizers.get(name))
            for name, at in self._numbered("optimizer", _OPTIMIZERS)
        }
        for kind, single, pattern in (("schedulers", "scheduler", _SCHEDULERS), ("custom", "object", _OBJECTS)):
            found.saved[kind] = {
                name: self._plain(kind, name, state.plain[kind].get(name), at)
                for name, at in self._numbered(single, pattern)
            }
        scaler = self._path("scaler.pt")
        found.saved["scaler"] = self._encoder.encode(load_mapped(scaler), "scaler") if os.path.exists(scaler) else None
        steps = self._steps()
        if steps is None:
            self._note("steps: the optimizer keeps none, so the count of this run goes on")
        self._compare_schedules(steps)
        counters = {**state.run.state_dict(), **({} if steps is None else {"step": steps})}
        found.saved["run"] = self._encoder.encode(counters, "run")
        found.saved["rng"] = self._streams(state.device)
        if self._encoder.problems:
            raise CheckpointError.of(self._encoder.problems)
        kept = TensorWeights(self._encoder.tensors)
        found.sources |= {path: (kept, path) for path in self._encoder.tensors}
        return found

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _numbered(self, single: str, pattern: str) -> Iterator[tuple[str, int]]:
        """Our names and accelerate's numbers of one kind of thing, by what lies in the folder."""
        found = [re.fullmatch(pattern, name) for name in self._here]
        count = len({int(match[1] or 0) for match in found if match})
        for number in range(count):
            yield single if number == 0 else f"{single}_{number}", number

    # -- models ------------------------------------------------------------------------------------------------

    def _model(self, name: str, number: int, state: TrainState) -> dict[str, Any]:
        weights = self._weights(number)
        there = called(weights, self._names.get(name, set()))
        self._found.sources |= {f"models/{name}/{own}": (weights, key) for own, key in there.items()}
        aliases = {}
        if name in state.models:
            known = ModuleState.of(state.models[name])
            for own in known.raw:
                present = [each for each in alike(own, known.aliases, state.tied.get(name, {})) if each in there]
                if own not in there and present:
                    aliases[own] = present[0]
        return {"aliases": aliases, "values": {}}

    def _weights(self, number: int) -> Weights:
        if not any(re.search(r"_rank\d+\.bin$", name) for name in self._here):
            return open_weights(self._folder, f"model_{number}" if number else "")
        raise CheckpointError(
            "checkpoint-foreign",
            f"{self._folder} holds each process's own part of the weights, as its FSDP had flattened it.",
            why=f"found {', '.join(name for name in self._here if '_rank' in name)} (LOCAL_STATE_DICT)",
            fix="load it where it was saved, and save it with FULL_STATE_DICT or SHARDED_STATE_DICT",
        )

    # -- optimizers --------------------------------------------------------------------------------------------

    def _optimizer(self, name: str, number: int, here: OptimizerState | None) -> dict[str, Any]:
        end, prefix = f"_{number}" if number else "", f"optimizers/{name}"
        divided = self._path(f"optimizer_{number}")
        if os.path.isdir(divided):
            states, groups = self._divided(divided, prefix)
        else:
            raw = load_mapped(self._path(f"optimizer{end}.bin"))
            states, groups = raw["state"], raw["param_groups"]
        called = self._called(name, groups)
        hyper = hyper_parameters(here, groups)
        encoded = {}
        for key, value in states.items():
            if key in called:
                plain = {each: item for each, item in value.items() if not isinstance(item, _There)}
                there = {each: {"$tensor": item.path} for each, item in value.items() if isinstance(item, _There)}
                encoded[called[key]] = {**self._encoder.encode(plain, f"{prefix}/{called[key]}"), **there}
        members = {called[key]: at for at, group in enumerate(groups) for key in group["params"]}
        return {
            "type": type(here.optimizer).__qualname__ if here else "",
            "groups": self._encoder.items(hyper, f"{prefix}/groups"),
            "members": members,
            "state": encoded,
            "other": {},
            "extra": {},
        }

    def _called(self, name: str, groups: list[dict[str, Any]]) -> dict[Any, str]:
        """For each key of a saved state, the name of the parameter here."""
        keys = [key for group in groups for key in group["params"]]
        order = self._orders.get(name, [])
        names = {key for key, _ in order}
        if all(isinstance(key, str) for key in keys):
            return {key: next((each for each in spelled(key) if each in names), key) for key in keys}
        if order and len(keys) != len(order):
            raise CheckpointError(
                "checkpoint-groups",
                f"optimizer {name!r} has {len(order)} parameters, but {len(keys)} in {self._folder}.",
                why="accelerate numbers parameters in their order, and knows no names",
                fix="build the optimizer of the same parameters, in the same groups and order, as when it was saved",
            )
        return {key: own for key, (own, _) in zip(keys, order, strict=False)}

    def _divided(self, folder: str, prefix: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """States by parameter name and groups of a folder of torch's distributed format."""
        weights = DividedWeights(STORE, folder)
        values = dict(weights.objects())
        states: dict[str, Any] = {}
        groups: dict[int, dict[str, Any]] = {}
        for key, path in weights.paths.items():
            if path[:2] == ("optimizer", "state"):
                item: Any = values.get(key)
                if key in weights.entries:
                    item = _There(f"{prefix}/{path[2]}/{path[3]}")
                    self._found.sources[item.path] = (weights, key)
                states.setdefault(str(path[2]), {})[str(path[3])] = item
            elif path[:2] == ("optimizer", "param_groups") and len(path) == 4:
                groups.setdefault(int(path[2]), {})[str(path[3])] = values.get(key)
        return states, [groups[at] for at in sorted(groups)]

    def _steps(self) -> int | None:
        """Optimizer steps done, as Adam and its kin count them."""
        found = []
        for name, saved in self._found.saved["optimizers"].items():
            for key, state in saved["state"].items():
                step = state.get("step")
                path = step.get("$tensor") if isinstance(step, dict) else None
                if path in self._encoder.tensors:
                    step = float(self._encoder.tensors[path])
                elif path is not None:
                    weights, there = self._found.sources[f"optimizers/{name}/{key}/step"]
                    step = float(weights.read(there, ()))
                found += [int(step)] if isinstance(step, (int, float)) else []
        return max(found, default=None)

    # -- the rest ----------------------------------------------------------------------------------------------

    def _plain(self, kind: str, name: str, here: Any, number: int) -> dict[str, Any]:
        end = f"_{number}" if number else ""
        file = f"scheduler{end}.bin" if kind == "schedulers" else f"custom_checkpoint_{number}.pkl"
        state = self._encoder.encode(load_mapped(self._path(file)), f"{kind}/{name}")
        return {"type": type(here).__qualname__, "state": state}

    def _compare_schedules(self, steps: int | None) -> None:
        for name, saved in self._found.saved["schedulers"].items():
            count = saved["state"].get("last_epoch") if isinstance(saved["state"], dict) else None
            if steps is not None and isinstance(count, int) and count != steps:
                self._note(
                    f"{name}: it was stepped {count} times in {steps} optimizer steps (accelerate does so once for each "
                    "process) and goes on from there, once for each step; learning rates are those of the checkpoint"
                )

    def _streams(self, device: torch.device) -> dict[str, Any]:
        ranks = [int(m[1]) for m in (re.fullmatch(r"random_states_(\d+)\.pkl", name) for name in self._here) if m]
        found: dict[str, Any] = {str(rank): None for rank in sorted(ranks)}
        for rank in {0, self._rank} & set(ranks):
            with torch.serialization.safe_globals(_ARRAYS):
                raw = load_mapped(self._path(f"random_states_{rank}.pkl"))
            found[str(rank)] = self._encoder.encode(_as_ours(raw, device), f"rng/{rank}")
        return found


_MODELS = r"(?:pytorch_)?model(?:_fsdp)?(?:_(\d+))?(?:\.safetensors|\.bin)?(?:\.index\.json)?|pytorch_model_fsdp.*_rank\d+\.bin"
_OPTIMIZERS = r"optimizer(?:_(\d+))?(?:\.bin)?"
_SCHEDULERS = r"scheduler(?:_(\d+))?\.bin"
_OBJECTS = r"custom_checkpoint_(\d+)\.pkl"


@dataclass(frozen=True)
class _There:
    """A tensor that stays in its file."""

    path: str


def _as_ours(raw: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Random streams as `rng.capture` gives them."""
    version, words, gauss = raw["random_state"]
    kind, keys, place, has_gauss, cached = raw["numpy_random_seed"]
    found: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "bit_generator": kind,
            "state": {"key": keys, "pos": place},
            "has_gauss": has_gauss,
            "gauss": cached,
        },
        "torch": raw["torch_manual_seed"],
        "device": "cpu",
    }
    for other in ("cuda", "xpu", "npu", "mlu", "sdaa", "musa", "hpu"):
        states = raw.get(f"torch_{other}_manual_seed")
        if states and other == device.type:
            found |= {"device": other, "accelerator": states[(device.index or 0) % len(states)]}
    return found
