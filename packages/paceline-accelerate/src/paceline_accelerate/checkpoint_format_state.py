"""Reads a checkpoint folder of accelerate as an `OpenCheckpoint`, which `TrainState` compares with this run and loads.

    model.safetensors, pytorch_model.bin      weights of the first model (model_1..., pytorch_model_1... of the next)
    pytorch_model_fsdp.bin                    the same where FSDP divided it and the state was gathered
    pytorch_model_fsdp_0/, optimizer_0/       the same where the state stayed divided: torch's distributed format
    optimizer.bin, scheduler.bin              of the first; optimizer_1.bin, ... of the next
    scaler.pt, custom_checkpoint_0.pkl        the loss scale; registered objects
    random_states_0.pkl                       random streams of each rank

Each rank reads only its part of a tensor. No code from a file is run: a file that holds more than tensors, arrays and plain
values is refused. The position in the data is not read, because it is a pickled object of accelerate's sampler class.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from paceline.base.errors import CheckpointError
from paceline.checkpoint.files import NUMPY_VALUES
from paceline.checkpoint.format.checkpoint_format import RunNames
from paceline.checkpoint.format.open_checkpoint import OpenCheckpoint
from paceline.checkpoint.state.train_state import KINDS, TrainState
from paceline.checkpoint.store import Store
from paceline.checkpoint.weights.model import without_wrappers
from paceline.checkpoint.weights.opening import open_weights
from paceline.checkpoint.weights.sources import DividedWeights, Weights, load_mapped, read_whole
from paceline_accelerate.checkpoint_functions import file_name
from paceline_accelerate.folder_names import RECORD, STREAMS_OF_RANK_0
from paceline_doors.state_translation import StateTranslation

# Names of files and folders; a group is the number of the model, the optimizer and so on.
_NUMBERED = {
    "model": r"(?:pytorch_)?model(?:_fsdp)?(?:_(\d+))?\.(?:safetensors|bin)(?:\.index\.json)?|pytorch_model_fsdp_(\d+)|"
    r"pytorch_model_fsdp.*_rank\d+\.bin",
    "optimizer": r"optimizer(?:_(\d+))?(?:\.bin)?",
    "scheduler": r"scheduler(?:_(\d+))?\.bin",
    "object": r"custom_checkpoint_(\d+)\.pkl",
}
_STREAMS = r"random_states_(\d+)\.pkl"


class AccelerateReader:
    """Reads one folder for one rank.

    Args:
        store, folder: accelerate's folder.
        state: what this run would save, which says what is needed.
        names: names of this run's parameters and ranks.

    Attributes:
        streams: what the file of this rank's random streams holds; that of rank 0's if there is none; {} without both.
    """

    def __init__(self, store: Store, folder: str, state: TrainState, names: RunNames) -> None:
        self._store = store
        self._folder = folder
        self._files = sorted(os.listdir(folder))
        self._names = names
        self._optimizers = state.optimizer_states()
        self._has_loaders = bool(state.plain["loaders"])
        self._translation = StateTranslation(state, KINDS - {"loaders"}, names)
        # The numbers of steps in the states of optimizers.
        self._steps: list[int] = []
        # How often each scheduler was stepped.
        self._scheduled: dict[str, int] = {}
        self.streams: Mapping[str, Any] = {}

    def read(self) -> OpenCheckpoint:
        """Reads the folder."""
        for name, number in self._numbered("model"):
            self._translation.add_model(name, self._weights(number))
        for name, number in self._numbered("optimizer"):
            divided = f"optimizer_{number}"
            self._add_optimizer(name, divided if divided in self._files else file_name("optimizer", number, "bin"))
        for name, number in self._numbered("scheduler"):
            state = self._load(file_name("scheduler", number, "bin"))
            self._add("schedulers", name, state)
            count = state.get("last_epoch") if isinstance(state, dict) else None
            if isinstance(count, int):
                self._scheduled[name] = count
        for name, number in self._numbered("object"):
            self._add("custom", name, self._load(f"custom_checkpoint_{number}.pkl"))
        if "scaler.pt" in self._files:
            self._translation.set("scaler", self._load("scaler.pt"))
        self._add_streams()
        steps = self.streams.get(RECORD, {}).get("step", max(self._steps, default=None))
        if steps is not None:
            self._translation.set("run", {**self._translation.state.run.state_dict(), "step": steps})
        self._note_differences(steps)
        return self._translation.opened()

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _load(self, name: str) -> Any:
        """Loads a file, which may have arrays and numbers of numpy: such as a learning rate that numpy has computed."""
        with torch.serialization.safe_globals(NUMPY_VALUES):
            return load_mapped(self._path(name))

    def _numbered(self, single: str) -> Iterator[tuple[str, int]]:
        """Yields Paceline's name and accelerate's number for each model, optimizer and so on in the folder.

        Args:
            single: Paceline's name for the first one.
        """
        numbers: set[int] = set()
        for file in self._files:
            match = re.fullmatch(_NUMBERED[single], file)
            if match:
                # The file of the first one has no number.
                numbers.add(int(next(filter(None, match.groups()), 0)))
        for number in range(len(numbers)):
            name = f"{single}_{number}" if number else single
            yield name, number

    def _weights(self, number: int) -> Weights:
        """Opens the weights of a model.

        Raises:
            CheckpointError: `checkpoint-foreign`, for LOCAL_STATE_DICT: only FSDP on as many processes can read such files.
        """
        flattened_parts = [name for name in self._files if re.search(r"_rank\d+\.bin$", name)]
        if not flattened_parts:
            return open_weights(self._folder, f"model_{number}" if number else "")
        raise CheckpointError(
            "checkpoint-foreign",
            f"{self._folder} holds each process's own part of the weights, as its FSDP had flattened it.",
            why=f"found {', '.join(flattened_parts)} (LOCAL_STATE_DICT)",
            fix="load it where it was saved, and save it with FULL_STATE_DICT or SHARDED_STATE_DICT",
        )

    # -- optimizers --------------------------------------------------------------------------------------------

    def read_optimizer(self, entry: str) -> OpenCheckpoint:
        """Reads the first optimizer alone, from a file or folder in this one."""
        self._add_optimizer("optimizer", entry)
        return self._translation.opened()

    def _add_optimizer(self, name: str, entry: str) -> None:
        state_dict: dict[str, Any] = {}
        if os.path.isdir(self._path(entry)):
            states, groups = _divided_optimizer(DividedWeights(self._store, self._path(entry)))
        else:
            state_dict = self._load(entry)
            states = state_dict.pop("state")
            groups = state_dict.pop("param_groups")
        names = self._parameter_names(name, groups)
        encoded = {}
        for key, state in states.items():
            if key in names:
                parameter = names[key]
                encoded[parameter] = self._encode(state, f"optimizers/{name}/{parameter}")
        other = {key: state for key, state in states.items() if key not in names}
        members = [[names[key] for key in group["params"]] for group in groups]
        here = self._optimizers.get(name)
        self._translation.add_optimizer(name, here, groups, members, encoded, other=other, extra=state_dict)
        # The number of optimizer steps stands nowhere else in the folder.
        for state in encoded.values():
            step = self._translation.number(state.get("step"))
            if step is not None:
                self._steps.append(int(step))

    def _encode(self, state: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Returns JSON for a parameter's state. Some of its tensors may be in their files still."""
        in_files = {key: item for key, item in state.items() if isinstance(item, _InFile)}
        plain = {key: item for key, item in state.items() if key not in in_files}
        encoded: dict[str, Any] = self._translation.encode(plain, path)
        for key, item in in_files.items():
            encoded[key] = self._translation.tensor(f"{path}/{key}", item.weights, item.name)
        return encoded

    def _parameter_names(self, optimizer: str, groups: list[dict[str, Any]]) -> dict[Any, str]:
        """Returns the name of the parameter in this run for each key of a saved state.

        Raises:
            CheckpointError: `checkpoint-groups`, if the keys are numbers and there are more or fewer than parameters.
        """
        keys: list[Any] = []
        for group in groups:
            keys += group["params"]
        order = [name for name, _ in self._names.parameters.get(optimizer, [])]
        if all(isinstance(key, str) for key in keys):
            # FSDP saves states by name. torch's wrappers (DDP, `torch.compile`) may have added parts to the names.
            names_here = set(order)
            names: dict[Any, str] = {}
            for key in keys:
                names[key] = next((name for name in without_wrappers(key) if name in names_here), key)
            return names
        if not order:
            # This run has no such optimizer, which the comparison of the states reports.
            return {key: str(key) for key in keys}
        why = "accelerate numbers parameters in their order, and knows no names"
        return self._translation.parameter_names(optimizer, keys, self._folder, why)

    # -- the rest ----------------------------------------------------------------------------------------------

    def _add(self, kind: str, name: str, state: object) -> None:
        self._translation.add(kind, name, self._translation.state.plain[kind].get(name), state)

    def _note_differences(self, steps: int | None) -> None:
        """Notes what a run of ours does otherwise than accelerate."""
        note = self._translation.note
        if self._has_loaders:
            note("data position: loaders begin an epoch anew; `skip_first_batches` passes over what was seen")
        if steps is None:
            note("steps: the optimizer keeps none, so the count of this run goes on")
        for name, count in self._scheduled.items():
            if steps is not None and count != steps:
                note(
                    f"{name}: it was stepped {count} times in {steps} optimizer steps (accelerate does so once for each "
                    "process) and goes on from there, once for each step; learning rates are those of the checkpoint"
                )

    def _add_streams(self) -> None:
        """Adds this rank's random streams, and rank 0's, from which a rank without any derives new ones."""
        device = self._translation.state.device
        for name in self._files:
            match = re.fullmatch(_STREAMS, name)
            if match is None:
                continue
            rank = int(match[1])
            streams = None
            if rank in (0, self._names.rank):
                self.streams = self._load(name)
                streams = _translated_streams(self.streams, device)
            self._translation.add_streams(rank, streams)
        if STREAMS_OF_RANK_0 not in self._files:
            self._translation.leave_out("rng")


def _divided_optimizer(weights: DividedWeights) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns states by parameter name, and groups, of an optimizer in torch's distributed format."""
    objects = dict(weights.objects())
    states: dict[str, Any] = {}
    groups: dict[int, dict[str, Any]] = {}
    # torch flattens the nested dictionary that was saved: a path is ("optimizer", "state", parameter's name, key), or
    # ("optimizer", "param_groups", number, key).
    for entry, path in weights.paths.items():
        if path[0] != "optimizer" or len(path) != 4:
            continue
        _, part, owner, key = path
        # Tensors are entries; what is no tensor was pickled beside them.
        is_tensor = entry in weights.entries
        if part == "state":
            states.setdefault(str(owner), {})[str(key)] = _InFile(weights, entry) if is_tensor else objects.get(entry)
        elif part == "param_groups":
            # Such as a learning rate, which is small.
            groups.setdefault(int(owner), {})[str(key)] = (
                read_whole(weights, entry) if is_tensor else objects.get(entry)
            )
    return states, [groups[number] for number in sorted(groups)]


class _InFile(NamedTuple):
    """A tensor that was not read from its file yet."""

    weights: Weights
    name: str


def _translated_streams(raw: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Returns random streams in the form of `random_streams.capture`."""
    # The results of `random.getstate` and `numpy.random.get_state`.
    version, words, gauss = raw["random_state"]
    kind, keys, position, has_gauss, cached = raw["numpy_random_seed"]
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "bit_generator": kind,
            "state": {"key": keys, "pos": position},
            "has_gauss": has_gauss,
            "gauss": cached,
        },
        "torch": raw["torch_manual_seed"],
        "device": "cpu",
    }
    # It has a state for each accelerator that the process saw. Those of another type of device are not needed.
    states = raw.get(f"torch_{device.type}_manual_seed")
    if states:
        streams["device"] = device.type
        streams["accelerator"] = states[(device.index or 0) % len(states)]
    return streams
