"""Checkpoint folders of DeepSpeed: what lies where, read without running code and without putting it together.

    stage 0       mp_rank_00_model_states.pt                    the model and its optimizer
    stages 1, 2   + (bf16_)zero_pp_rank_R_mp_rank_00_optim_states.pt   of each group a flat vector, cut over ranks
    stage 3       zero_pp_rank_R_mp_rank_00_model_states.pt     buffers and frozen parts; parameters are placeholders
                  (bf16_)zero_pp_rank_R_mp_rank_00_optim_states.pt     of each parameter an R-th, laid end to end
    pipeline      layer_NN-model_states.pt, mp_rank_SS_model_states.pt of each stage

`Pieces` knows for each tensor the flat vectors that hold it, so that a rank reads its part of the mapped files alone.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline.checkpoint.files import NUMPY_VALUES
from paceline.checkpoint.weights.sources import Box, WeightEntry, load_mapped

# The first number is the rank among the replicas, the second the rank of tensor parallelism.
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:\w+?_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
# Keys of DeepSpeed's own beside which a script's client state lies.
_KEYS = """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size
    mp_world_size checkpoint_parallel_dimensions ds_config ds_version num_experts moe_autoep
    universal_checkpoint_info zero_partitioned_expert_metadata autoep_layers
"""
_OWN = frozenset(_KEYS.split())


class _Plain:
    """Stands for a small class of DeepSpeed's: its attributes, and none of its code."""


class _Number(int):
    """Stands for an enumeration of DeepSpeed's."""


# The files are read with `weights_only`, which refuses every class that is not named here; nothing of DeepSpeed is imported.
_SAFE: list[Any] = [
    (_Plain, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (type("_Scale", (_Plain,), {}), "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (type("_Fragment", (_Plain,), {}), "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    Namespace, *NUMPY_VALUES,
]  # fmt: skip


class Pieces:
    """Whole tensors, of each of which flat vectors hold some elements.

    Args:
        shapes: of the tensors.
        parts: for each name, its vectors in order, first to last element.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], parts: Mapping[str, Sequence[Tensor]]) -> None:
        self.entries: dict[str, WeightEntry] = {}
        for name, shape in shapes.items():
            self.entries[name] = WeightEntry(name, tuple(shape), parts[name][0].dtype)
        self._parts = parts

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a box of one tensor; only the rows that it touches are read."""
        shape = self.entries[name].shape
        if not shape:
            return self._parts[name][0].reshape(()).detach()
        # The vectors are in row-major order, so whole rows are one range of elements. What the box leaves out in the
        # other dimensions lies inside this range, and is cut off afterwards.
        row_size = prod(shape[1:])
        rows = self._elements(name, box[0].start * row_size, box[0].stop * row_size)
        return rows.view(-1, *shape[1:])[(slice(None), *box[1:])]

    def _elements(self, name: str, start: int, stop: int) -> Tensor:
        """Joins elements `start` to `stop` of a tensor from the parts that hold them, as a flat vector."""
        pieces: list[Tensor] = []
        part_start = 0  # number of the part's first element in the tensor
        for part in self._parts[name]:
            part_stop = part_start + part.numel()
            low = max(start, part_start)
            high = min(stop, part_stop)
            if low < high:
                pieces.append(part[low - part_start : high - part_start])
            part_start = part_stop
        # One piece stays a view of its file; joining several copies them.
        if len(pieces) == 1:
            return pieces[0].detach()
        return torch.cat(pieces).detach()


class DeepSpeedFolder:
    """One checkpoint of DeepSpeed's.

    Args:
        folder: `SAVE_DIR/TAG`.

    Attributes:
        first: what rank 0's file of the model holds.
        shapes: for each group of the optimizer, its parameters and their shapes; None where stage 0 kept no names.

    Raises:
        CheckpointError: `checkpoint-foreign`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        names = sorted(os.listdir(folder))
        self._models = self._by_rank(names, _MODEL)
        self._optims = self._by_rank(names, _OPTIMIZER)
        layer_files = [name for name in names if _LAYER.fullmatch(name)]
        if layer_files:
            self._refuse("a pipeline's", layer_files)
        tensor_ranks: set[int] = set()
        for name in names:
            match = _MODEL.fullmatch(name)
            if match:
                tensor_ranks.add(int(match[2]))
        if len(tensor_ranks) > 1:
            self._refuse("tensor parallelism's", list(self._models.values()))
        self._check_files(self._models, 1, "*_model_states.pt")
        self.first: dict[str, Any] = self._read(self._models[0])
        self.shapes: list[dict[str, tuple[int, ...]]] | None = None
        groups = self.first.get("param_shapes")
        if groups is not None:
            # Older versions of DeepSpeed wrote a single group without a list around it.
            if not isinstance(groups, list):
                groups = [groups]
            self.shapes = []
            for group in groups:
                self.shapes.append({name: tuple(shape) for name, shape in group.items()})
        self._check_ranks()

    def _by_rank(self, names: list[str], pattern: re.Pattern[str]) -> dict[int, str]:
        """Finds the files whose names fit, by their ranks; the one file of stage 0 names no rank and counts as rank 0's."""
        files: dict[int, str] = {}
        for name in names:
            match = pattern.fullmatch(name)
            if match:
                files[int(match[1] or 0)] = name
        return files

    def _refuse(self, whose: str, files: list[str]) -> None:
        raise CheckpointError(
            "checkpoint-foreign",
            f"{self.folder} holds {whose} parts of a model, which are not put together here.",
            why=f"found {', '.join(files[:4])}",
            fix="load it where it was saved, write the model whole (`engine.save_16bit_model`), and load that",
        )

    def _check_ranks(self) -> None:
        if self.shapes is None:
            return  # stage 0, where rank 0's file has all
        count = self.first.get("dp_world_size", len(self._optims))
        self._check_files(self._optims, count, "*_optim_states.pt")
        # Stage 3 alone cuts frozen parameters, and each rank's part of them is in that rank's model file.
        if self.first.get("frozen_param_shapes") and self.stage == 3:
            self._check_files(self._models, count, "*_model_states.pt")

    def _check_files(self, files: dict[int, str], count: int, pattern: str) -> None:
        """Checks that there is a file of each of the first `count` ranks; fewer parts would be joined to wrong values.

        Raises:
            CheckpointError: `checkpoint-damaged`.
        """
        missing = [rank for rank in range(count) if rank not in files]
        if missing:
            raise CheckpointError(
                "checkpoint-damaged",
                f"{self.folder} lacks the files of rank {', '.join(map(str, missing))}.",
                why=f"{count} ranks saved it, and {len(files)} files {pattern} are there",
                fix="copy the folder again, from all hosts that wrote it",
            )

    def _read(self, name: str) -> Any:
        with torch.serialization.safe_globals(_SAFE):
            return load_mapped(os.path.join(self.folder, name))

    @cached_property
    def _states(self) -> list[dict[str, Any]]:
        """The state of the optimizer that each rank saved."""
        states = []
        for rank in sorted(self._optims):
            content = self._read(self._optims[rank])
            states.append(content["optimizer_state_dict"])
        return states

    @property
    def stage(self) -> int:
        """The ZeRO stage that wrote it."""
        # Stage 0 cuts no parameter, and so it writes neither their shapes nor the optimizer's files.
        if self.shapes is None:
            return 0
        return int(self._states[0]["zero_stage"])

    # -- weights ---------------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> Pieces:
        """The whole model, in the precision in which its optimizer keeps it; a tied tensor under its first name."""
        shared = self.first.get("shared_params") or {}
        shapes: dict[str, tuple[int, ...]] = {}
        parts: dict[str, list[Tensor]] = {}
        for name, tensor in self.first["module"].items():
            if isinstance(tensor, Tensor) and name not in shared:
                shapes[name] = tuple(tensor.shape)
                parts[name] = [tensor.reshape(-1)]
        # What the optimizer keeps of a parameter is float32; the model's own may have 16 bits.
        for name, shape in self.trained.items():
            shapes[name] = shape
            parts[name] = self.master[name]
        if self.stage != 3:
            return Pieces(shapes, parts)
        # Stage 3 cuts frozen parameters over the ranks too, but into the model's files, because no optimizer has them.
        frozen_shapes = self.first.get("frozen_param_shapes") or {}
        fragments_by_rank: list[dict[str, Tensor]] = []
        if frozen_shapes:
            for rank in sorted(self._models):
                fragments_by_rank.append(self._read(self._models[rank])["frozen_param_fragments"])
        for name, shape in frozen_shapes.items():
            fragments = [fragments_of_rank[name] for fragments_of_rank in fragments_by_rank]
            shapes[name] = tuple(shape)
            parts[name] = list(_cut(fragments, 0, prod(shape)))
        # What is neither trained nor frozen nor a buffer is the empty placeholder of a parameter.
        with_values = {*self.trained, *frozen_shapes, *self.first["buffer_names"]}
        for name in shapes.keys() - with_values:
            del shapes[name], parts[name]
        return Pieces(shapes, parts)

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of tied parameters -> the first."""
        return dict(self.first.get("shared_params") or {})

    @cached_property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that are trained; empty at stage 0."""
        shapes: dict[str, tuple[int, ...]] = {}
        for group in self.shapes or ():
            shapes.update(group)
        return shapes

    @cached_property
    def master(self) -> dict[str, list[Tensor]]:
        """The parts, in float32, of each parameter that is trained: pieces of the ranks' flat vectors."""
        flats_by_rank = [state[self._flats_key] for state in self._states]
        return self._divided(flats_by_rank)

    @property
    def _flats_key(self) -> str:
        """The key of the flat vectors in float32 in a rank's optimizer state."""
        if self.stage == 3:
            return "fp32_flat_groups"
        return "single_partition_of_fp32_groups"

    def _divided(self, flats_by_rank: list[list[Tensor]]) -> dict[str, list[Tensor]]:
        """Cuts flat vectors into the parts of each parameter, in the layout of this stage."""
        if self.stage == 3:
            return self._of_parameters(flats_by_rank)
        return self._of_groups(flats_by_rank)

    def _of_groups(self, flats_by_rank: list[list[Tensor]]) -> dict[str, list[Tensor]]:
        """Cuts vectors of stages 1 and 2: a group's parameters lie end to end, and the whole is cut over the ranks.

        Args:
            flats_by_rank: for each rank, its part of each group.
        """
        parts: dict[str, list[Tensor]] = {name: [] for name in self.trained}
        for flats, state in zip(flats_by_rank, self._states, strict=True):
            for flat, fragments in zip(flats, state["param_slice_mappings"], strict=True):
                # A rank's cut may go through a parameter: then this rank names a fragment of it, and the next rank the rest.
                for name, fragment in fragments.items():
                    parts[name].append(flat.reshape(-1)[fragment.start : fragment.start + fragment.numel])
        return parts

    def _of_parameters(self, flats_by_rank: list[list[Tensor]]) -> dict[str, list[Tensor]]:
        """Cuts vectors of stage 3, where a rank's parts of the parameters lie end to end in one vector or several.

        Args:
            flats_by_rank: for each rank, its vectors, which are as long as those of the others.
        """
        parts: dict[str, list[Tensor]] = {}
        lengths = [flat.numel() for flat in flats_by_rank[0]]
        number = 0  # of the vector that the next part lies in
        start = 0  # of that part in it
        for name, shape in self.trained.items():
            # Parts lie there in the order of `trained`, and none goes over the end of a vector.
            while start >= lengths[number] and number + 1 < len(lengths):
                number += 1
                start = 0
            numel = prod(shape)
            flats = [flats_of_rank[number].reshape(-1) for flats_of_rank in flats_by_rank]
            parts[name] = list(_cut(flats, start, numel))
            start += _part_size(numel, len(flats_by_rank))
        return parts

    # -- optimizer -------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> dict[str, Any]:
        """Rank 0's optimizer in the form of torch's `state_dict`; from stage 1 on its parameters are flat vectors."""
        if self.stage == 0:
            state = self.first["optimizer"] or {}
            return dict(state.get("optimizer_state_dict", state))  # without that key it is torch's own
        return dict(self._states[0][self._optimizer_key])

    @property
    def _optimizer_key(self) -> str:
        """The key of torch's optimizer state in a rank's optimizer state."""
        if self.stage == 3:
            return "optimizer_state_dict"
        return "base_optimizer_state"

    def moments(self) -> tuple[dict[str, Pieces], dict[str, dict[str, Any]]]:
        """Returns the states with a parameter's shape, by key, and the other states of each parameter. Not at stage 0."""
        # Of each rank: number of a flat vector -> its states. To the optimizer, each vector is one parameter.
        states_by_rank = [state[self._optimizer_key]["state"] for state in self._states]
        sizes = [flat.numel() for flat in self._states[0][self._flats_key]]
        # States with as many elements as the vector hold a number for each element of its parameters.
        flat_keys: set[str] = set()
        for number, state in states_by_rank[0].items():
            for key, value in state.items():
                if _is_flat(value, sizes[number]):
                    flat_keys.add(key)
        pieces: dict[str, Pieces] = {}
        for key in sorted(flat_keys):
            flats_by_rank: list[list[Tensor]] = []
            for states in states_by_rank:
                flats_in_order = [states[number][key] for number in sorted(states)]
                flats_by_rank.append(flats_in_order)
            divided = self._divided(flats_by_rank)
            pieces[key] = Pieces(self.trained, divided)
        # What is no vector (a count of steps) is the same for all parameters of a group, and of all groups.
        first_states: dict[str, Any] = next(iter(states_by_rank[0].values()), {})
        others = {key: value for key, value in first_states.items() if key not in flat_keys}
        # Copies, because each parameter's states are changed by themselves.
        others_by_name = {name: dict(others) for name in self.trained}
        return pieces, others_by_name

    @property
    def dynamic_scale(self) -> dict[str, Any] | None:
        """The attributes of the dynamic loss scale, by DeepSpeed's names; None where there was none."""
        if self.stage == 0:
            state = self.first["optimizer"] or {}
        else:
            state = self._states[0]
        if not state.get("dynamic_loss_scale"):
            return None
        # Stage 0 writes the numbers themselves, and the other stages write the object that keeps them.
        if "cur_scale" in state:
            return dict(state)
        return dict(vars(state["loss_scaler"]))

    @property
    def client_state(self) -> dict[str, Any]:
        """The `client_state` that the script gave to `save_checkpoint`."""
        return {key: value for key, value in self.first.items() if key not in _OWN}


def _is_flat(value: object, numel: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == numel and numel > 0


def _part_size(numel: int, num_ranks: int) -> int:
    """Counts the elements of a parameter on each rank at stage 3: all ranks have as many, the last ones with padding."""
    return -(-numel // num_ranks)  # rounded up


def _cut(flats: Sequence[Tensor], start: int, numel: int) -> Iterator[Tensor]:
    """Yields each rank's part of a parameter, without padding; in every rank's vector it begins at `start`."""
    size = _part_size(numel, len(flats))
    for rank, flat in enumerate(flats):
        # Negative where earlier ranks already have all elements; the part of this rank is padding alone.
        remaining = max(0, numel - rank * size)
        yield flat.reshape(-1)[start : start + min(size, remaining)]
