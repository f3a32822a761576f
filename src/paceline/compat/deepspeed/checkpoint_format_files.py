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
from paceline.checkpoint.files import NUMPY_ARRAYS
from paceline.checkpoint.weights.sources import Box, Entry, load_mapped

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


_SAFE: list[Any] = [
    (_Plain, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (type("_Scale", (_Plain,), {}), "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (type("_Fragment", (_Plain,), {}), "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    Namespace, *NUMPY_ARRAYS,
]  # fmt: skip


class Pieces:
    """Whole tensors, of each of which flat vectors hold some elements.

    Args:
        shapes: of the tensors.
        parts: for each name, its vectors in order, first to last element.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], parts: Mapping[str, Sequence[Tensor]]) -> None:
        self.entries: dict[str, Entry] = {}
        for name, shape in shapes.items():
            self.entries[name] = Entry(name, tuple(shape), parts[name][0].dtype)
        self._parts = parts

    def read(self, name: str, box: Box) -> Tensor:
        """A box of one tensor; the rows that it touches are read."""
        shape = self.entries[name].shape
        if not shape:
            return self._parts[name][0].reshape(()).detach()
        inner = prod(shape[1:])
        rows = self._elements(name, box[0].start * inner, box[0].stop * inner)
        return rows.view(-1, *shape[1:])[(slice(None), *box[1:])]

    def _elements(self, name: str, start: int, stop: int) -> Tensor:
        pieces: list[Tensor] = []
        at = 0
        for part in self._parts[name]:
            low, high = max(start, at), min(stop, at + part.numel())
            if low < high:
                pieces.append(part[low - at : high - at])
            at += part.numel()
        # One piece stays a view of its file.
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).detach()


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
        layers = [name for name in names if _LAYER.fullmatch(name)]
        if layers or len({int(m[2]) for name in names if (m := _MODEL.fullmatch(name))}) > 1:
            self._refuse("a pipeline's" if layers else "tensor parallelism's", layers or list(self._models.values()))
        self.first: dict[str, Any] = self._read(self._models[0])
        self.shapes: list[dict[str, tuple[int, ...]]] | None = None
        groups = self.first.get("param_shapes")
        if groups is not None:
            self.shapes = []
            for group in groups if isinstance(groups, list) else [groups]:
                self.shapes.append({name: tuple(shape) for name, shape in group.items()})
        self._check_ranks()

    def _by_rank(self, names: list[str], pattern: re.Pattern[str]) -> dict[int, str]:
        return {int(match[1] or 0): name for name in names if (match := pattern.fullmatch(name))}

    def _refuse(self, whose: str, files: list[str]) -> None:
        raise CheckpointError(
            "checkpoint-foreign",
            f"{self.folder} holds {whose} parts of a model, which are not put together here.",
            why=f"found {', '.join(files[:4])}",
            fix="load it where it was saved, write the model whole (`engine.save_16bit_model`), and load that",
        )

    def _check_ranks(self) -> None:
        count = self.first.get("dp_world_size", len(self._optims))
        missing = [rank for rank in range(count) if rank not in self._optims] if self.shapes is not None else []
        if missing:
            raise CheckpointError(
                "checkpoint-damaged",
                f"{self.folder} lacks the files of rank {', '.join(map(str, missing))}.",
                why=f"{count} ranks saved it, and {len(self._optims)} files *_optim_states.pt are there",
                fix="copy the folder again, from all hosts that wrote it",
            )

    def _read(self, name: str) -> Any:
        with torch.serialization.safe_globals(_SAFE):
            return load_mapped(os.path.join(self.folder, name))

    @cached_property
    def _states(self) -> list[dict[str, Any]]:
        """What each rank's optimizer saved."""
        return [self._read(self._optims[rank])["optimizer_state_dict"] for rank in sorted(self._optims)]

    @property
    def stage(self) -> int:
        """The ZeRO stage that wrote it."""
        return 0 if self.shapes is None else int(self._states[0]["zero_stage"])

    # -- weights ---------------------------------------------------------------------------------------------------

    @cached_property
    def weights(self) -> Pieces:
        """The whole model, in the precision in which its optimizer keeps it; a tied tensor under its first name."""
        shared = self.first.get("shared_params") or {}
        shapes, parts = {}, {}
        for name, tensor in self.first["module"].items():
            if isinstance(tensor, Tensor) and name not in shared:
                shapes[name], parts[name] = tuple(tensor.shape), [tensor.reshape(-1)]
        for name, shape in self.trained.items():
            shapes[name], parts[name] = shape, self.master[name]
        if self.stage == 3:
            frozen = self.first.get("frozen_param_shapes") or {}
            ranks = sorted(self._models) if frozen else ()
            fragments = [self._read(self._models[rank])["frozen_param_fragments"] for rank in ranks]
            for name, shape in frozen.items():
                shapes[name] = tuple(shape)
                parts[name] = list(_cut([of_rank[name] for of_rank in fragments], 0, prod(shape)))
            # What is neither trained nor frozen nor a buffer is the empty placeholder of a parameter.
            for name in shapes.keys() - frozen.keys() - self.trained.keys() - set(self.first["buffer_names"]):
                del shapes[name], parts[name]
        return Pieces(shapes, parts)

    @property
    def aliases(self) -> dict[str, str]:
        """The other names of tied parameters -> the first."""
        return dict(self.first.get("shared_params") or {})

    @cached_property
    def trained(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters that are trained; empty at stage 0."""
        return {name: shape for group in self.shapes or () for name, shape in group.items()}

    @cached_property
    def master(self) -> dict[str, list[Tensor]]:
        """The flat vectors of each parameter that is trained."""
        if self.stage == 3:
            return self._of_thirds([state["fp32_flat_groups"] for state in self._states])
        return self._of_groups([state["single_partition_of_fp32_groups"] for state in self._states])

    def _of_groups(self, ranks: list[Any]) -> dict[str, list[Tensor]]:
        """Stages 1 and 2: a group's parameters lie end to end, and the whole is cut over the ranks."""
        parts: dict[str, list[Tensor]] = {name: [] for name in self.trained}
        for rank, flats in enumerate(ranks):
            for flat, slices in zip(flats, self._states[rank]["param_slice_mappings"], strict=True):
                for name, part in slices.items():
                    parts[name].append(flat.reshape(-1)[part.start : part.start + part.numel])
        return parts

    def _of_thirds(self, ranks: list[Any]) -> dict[str, list[Tensor]]:
        """Stage 3: each parameter is cut over the ranks, and a rank's parts lie end to end in one vector or several."""
        parts: dict[str, list[Tensor]] = {}
        number = at = 0
        for name, shape in self.trained.items():
            while at >= ranks[0][number].numel() and number + 1 < len(ranks[0]):
                number, at = number + 1, 0
            parts[name] = list(_cut([flats[number].reshape(-1) for flats in ranks], at, prod(shape)))
            at += -(-prod(shape) // len(ranks))
        return parts

    # -- optimizer -------------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> dict[str, Any]:
        """Rank 0's optimizer, as torch's `state_dict` says it: flat vectors, but for stage 0."""
        if self.stage == 0:
            own = self.first["optimizer"] or {}
            return dict(own.get("optimizer_state_dict", own))
        return dict(self._states[0][self._optimizer_key])

    @property
    def _optimizer_key(self) -> str:
        return "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"

    def moments(self) -> tuple[dict[str, Pieces], dict[str, dict[str, Any]]]:
        """States of the parameters' shapes, by key; and what else the optimizer keeps of each parameter. Not at stage 0."""
        states_by_rank = [state[self._optimizer_key]["state"] for state in self._states]
        is_stage_3 = self.stage == 3
        flat_groups = "fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"
        sizes = [flat.numel() for flat in self._states[0][flat_groups]]
        keys: set[str] = set()
        for number, state in states_by_rank[0].items():
            for key, value in state.items():
                if _is_flat(value, sizes[number]):
                    keys.add(key)
        pieces: dict[str, Pieces] = {}
        for key in sorted(keys):
            flats: list[list[Tensor]] = []
            for states in states_by_rank:
                flats.append([states[number][key] for number in sorted(states)])
            parts = self._of_thirds(flats) if is_stage_3 else self._of_groups(flats)
            pieces[key] = Pieces(self.trained, parts)
        # What is no vector (a count of steps) is the same for all parameters of a group, and of all groups.
        first = next(iter(states_by_rank[0].values()), {})
        others = {key: value for key, value in first.items() if key not in keys}
        return pieces, {name: dict(others) for name in self.trained}

    @property
    def scale(self) -> float | None:
        """The loss scale, where there was a dynamic one."""
        own = self._states[0] if self.stage else self.first["optimizer"] or {}
        if not own.get("dynamic_loss_scale"):
            return None
        return float(own["cur_scale"] if "cur_scale" in own else own["loss_scaler"].cur_scale)

    @property
    def client_state(self) -> dict[str, Any]:
        """What the script gave to be kept."""
        return {key: value for key, value in self.first.items() if key not in _OWN}


def _is_flat(value: Any, numel: int) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == numel and numel > 0


def _cut(flats: Sequence[Tensor], at: int, numel: int) -> Iterator[Tensor]:
    """A parameter's part in the vector of each rank, without what pads the last ones."""
    size = -(-numel // len(flats))
    for rank, flat in enumerate(flats):
        yield flat.reshape(-1)[at : at + max(0, min(size, numel - rank * size))]
