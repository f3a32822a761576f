"""`load`: a model of any size from a checkpoint to where a placement puts it; each weight is read once.

the model is built without weights  ->  names and shapes are compared with the files  ->  a placement is chosen
->  block by block: weights to their device, to the host's memory, or mapped where they lie  ->  hooks
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.base.errors import CheckpointError, PlanError, PrepareError, Problem, short_repr
from paceline.base.files import expanded
from paceline.checkpoint.files import replacing, write_safetensors, writing
from paceline.checkpoint.state.match import Mismatch
from paceline.checkpoint.state.module_state import ModuleState
from paceline.checkpoint.weights.model import match
from paceline.checkpoint.weights.opening import open_weights, weights_in_files
from paceline.checkpoint.weights.sources import Box, SafeWeights, WeightEntry, Weights, read_whole
from paceline_large.inference.blocks import Dtypes, placement_facts
from paceline_large.inference.choose import choose_placement, placement_from_map
from paceline_large.inference.memory import available_memory, parse_device, parse_memory
from paceline_large.inference.placement import PlacedBlock, Placement
from paceline_large.inference.placing import ParameterSlots, block_buffers, check_placement, empty_weights, put_blocks
from paceline_large.inference.workload import Rates, Workload, readable

_log = logging.getLogger("paceline_large.inference")
Factory = Callable[[], nn.Module]
FilePath = str | os.PathLike[str]
Places = Mapping[str, str | int | torch.device]
Memory = Mapping[str | int, int | str]


def plan(
    model: nn.Module | Factory,
    weights: FilePath | None = None,
    *,
    placement: str | Places = "auto",
    memory: Memory | None = None,
    dtype: torch.dtype | None = None,
    workload: Workload | None = None,
    rates: Rates | None = None,
    strict: bool = True,
) -> Placement:
    """Returns the placement that `load` would choose. It reads no weights, and the devices need not exist.

    Args:
        model, weights, placement, memory, dtype, workload, rates, strict: as for `load`; without `weights` the model's own
            shapes and dtypes count.

    Raises:
        PlanError: `placement-memory`, `placement-name`, `placement-split`, `placement-missing`, `placement-device`,
            `placement-argument`.
        CheckpointError: as `load`.
    """
    _check_arguments(model, memory, dtype)
    built = _build(model)
    if weights is None:
        return _choose(built, placement, memory, dtype, workload, rates)
    # The files may hold other dtypes than the model was built with. Only their names, shapes and dtypes are read.
    dtypes = _Checkpoint(built, weights, dtype, strict=strict).dtypes()
    return _choose(built, placement, memory, dtypes, workload, rates)


def load(
    model: nn.Module | Factory,
    weights: FilePath,
    *,
    placement: str | Places | Placement = "auto",
    memory: Memory | None = None,
    dtype: torch.dtype | None = None,
    workload: Workload | None = None,
    rates: Rates | None = None,
    offload_folder: FilePath | None = None,
    strict: bool = True,
) -> nn.Module:
    """Loads a model for inference, also one that is larger than the device or than the memory of the host.

    The model comes back in evaluation mode, and is called as before. `model.placed` is its `PlacedModel`, whose
    `placement` says where each block is.

    Args:
        model: a function that builds the model, called so that no memory is taken for weights; or a model, on the meta
            device or not.
        weights: a file or a folder: safetensors, whole or cut, torch's files, a checkpoint of Paceline.
        placement: "auto", names of modules -> devices (see `placement_from_map`), or what `plan` returned.
        memory: for "auto": device -> bytes, such as {"cuda:0": "20GiB", "cpu": "64GiB"}; by default what is free.
        dtype: converts floating-point weights; None keeps them as the files have them.
        workload: the largest call that memory is planned for; by default 1 row of 1024 tokens.
        rates: of this machine, for the forecast; see `measure_rates`.
        offload_folder: where weights are written that shall wait on the disk but cannot be mapped as they are: those of
            other formats than safetensors, and those that `dtype` converts.
        strict: whether the names in the files and in the model must be the same.

    Raises:
        PlanError: as `plan`, and `placement-folder`.
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-other-model`, `checkpoint-disk-full`,
            `checkpoint-not-writable`.
        PrepareError: `placement-buffers`.
    """
    _check_arguments(model, memory, dtype)
    built = _build(model)
    checkpoint = _Checkpoint(built, weights, dtype, strict=strict)
    if not isinstance(placement, Placement):
        placement = _choose(built, placement, memory, checkpoint.dtypes(), workload, rates)
    check_placement(built, placement)
    _check_buffers(built, checkpoint)
    folder = checkpoint.check_folder(placement, offload_folder)

    numbers = itertools.count()

    def values(placed: PlacedBlock) -> dict[str, Tensor]:
        file = os.path.join(folder, f"block_{next(numbers):05d}.safetensors") if folder else None
        return checkpoint.values(placed, file) | checkpoint.buffers(placed)

    built.eval()
    built.placed = put_blocks(built, placement, checkpoint.slots, values)  # type: ignore[assignment]
    _log.info("%s", placement.explain())
    return built


def _check_arguments(model: object, memory: object, dtype: object) -> None:
    """Reports arguments that are easily mixed up, all at once, before anything is built or read."""
    problems = []
    if not callable(model):
        problem = Problem(
            "placement-argument",
            f"the model is a {type(model).__name__}: {short_repr(model)}.",
            why="it must be a function that builds the model, or the model itself; the weights come second",
            fix="write load(lambda: Model(config), folder)",
        )
        problems.append(problem)
    if memory is not None and not isinstance(memory, Mapping):
        problem = Problem(
            "placement-argument",
            f"memory is a {type(memory).__name__}: {short_repr(memory)}.",
            why="it must say how many bytes each device may hold",
            fix='write memory={"cuda:0": "20GiB", "cpu": "64GiB"}',
        )
        problems.append(problem)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        problem = Problem(
            "placement-argument",
            f"dtype is a {type(dtype).__name__}: {short_repr(dtype)}.",
            why="it must be a dtype of torch",
            fix="write dtype=torch.bfloat16",
        )
        problems.append(problem)
    if problems:
        raise PlanError.of(problems)


def _build(model: nn.Module | Factory) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    with empty_weights():
        return model()


def _choose(
    model: nn.Module,
    placement: str | Places,
    memory: Memory | None,
    dtype: torch.dtype | Dtypes | None,
    workload: Workload | None,
    rates: Rates | None,
) -> Placement:
    facts = placement_facts(model, dtype)
    if placement == "auto":
        budgets = available_memory() if memory is None else parse_memory(memory)
        return choose_placement(facts, budgets, workload, rates)
    # The name of one device stands for a map that puts the whole model there.
    if isinstance(placement, str):
        placement = {"": placement}
    places = {}
    problems = []
    for name, device in placement.items():
        places[name], problem = parse_device(device)
        problems += problem
    if problems:
        raise PlanError.of(problems)
    return placement_from_map(facts, places, parse_memory(memory or {}), workload, rates)


class _Renamed:
    """Shows weights under the names of a model with a head where the files hold one without, and the other way round.

    A model of transformers has the model without its head as the attribute that `base_model_prefix` names. Files that were
    saved without the head lack this prefix.

    Args:
        weights: the weights, under the names of the files.
        own: the names of the model that gets them.
        prefix: the name of the model without its head; "" if there is none.
    """

    def __init__(self, weights: Weights, own: Collection[str], prefix: str) -> None:
        self._weights = weights
        self._saved_names = {}
        for saved in weights.entries:
            spellings = [saved]
            if prefix:
                spellings += [f"{prefix}.{saved}", saved.removeprefix(f"{prefix}.")]
            # A name that the model does not have stays as it is, so that an error names it as the files do.
            name = next((spelling for spelling in spellings if spelling in own), saved)
            self._saved_names[name] = saved
        entries: dict[str, WeightEntry] = {}
        for name, saved in self._saved_names.items():
            entries[name] = replace(weights.entries[saved], name=name)
        self.entries: Mapping[str, WeightEntry] = entries

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a box of one tensor."""
        return self._weights.read(self._saved_names[name], box)


class _Checkpoint:
    """The weights of files, under the names of one model.

    Args:
        model: the model that gets the weights.
        path: the file or folder.
        dtype: the dtype of floating-point weights; None keeps the dtypes of the files.
        strict: whether the names in the files and in the model must be the same.

    Attributes:
        slots: the places in the model where its parameters are.
    """

    def __init__(self, model: nn.Module, path: FilePath, dtype: torch.dtype | None, *, strict: bool) -> None:
        # A URL stays as it is; anything else is a path, which errors name in full.
        folder = os.fspath(path)
        if "://" not in folder:
            folder = os.path.abspath(expanded(folder))
        self._model = model
        weights = open_weights(folder)
        # Only safetensors files hold each tensor as plain contiguous bytes, which can be used where they lie.
        self._can_be_mapped = isinstance(weights, SafeWeights)
        self._dtype = dtype
        state = ModuleState.of(model)
        self._buffers = state.buffers
        self._weights: Weights = _Renamed(weights, state.raw, getattr(model, "base_model_prefix", ""))
        # First name of a tensor in the model -> its name in the files.
        self._sources, mismatch = match(state, self._weights, set(state.raw), {})
        # With `strict=False` a tensor that the files lack keeps its value. On the meta device it has none to keep.
        without_value = {name: shape for name, shape in mismatch.missing.items() if state.tensors[name].is_meta}
        if mismatch and (strict or mismatch.misshapen or without_value):
            raise CheckpointError.of([mismatch.problem("this one", folder)])
        if mismatch:
            _log.warning("%s: names that do not agree with the model: %s", folder, ", ".join(_names(mismatch)[:8]))
        self.slots = ParameterSlots(model)

    def dtypes(self) -> dict[str, torch.dtype]:
        """Returns the dtype that each parameter of the files will have."""
        return {name: self.dtype_of(name) for name in self._sources if name not in self._buffers}

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype that a tensor will have; integers are never converted."""
        saved = self._weights.entries[self._sources[name]].dtype
        if self._dtype is None or not saved.is_floating_point:
            return saved
        return self._dtype

    def covers(self, name: str) -> bool:
        """Returns whether the files have the tensor."""
        return name in self._sources

    def check_folder(self, placement: Placement, offload_folder: FilePath | None) -> str | None:
        """Makes and returns the folder for weights that cannot be mapped as they are; None if no block needs it."""
        written = [placed for placed in placement.blocks if placed.home == "disk" and not self._mapped(placed)]
        if not written:
            return None
        nbytes = readable(sum(placed.block.parameter_bytes for placed in written))
        if offload_folder is None:
            reason = "the files are not in the safetensors format, so that they cannot be used where they lie"
            if self._can_be_mapped:
                reason = "the files have other dtypes than the weights shall have, or lack some of them"
            raise PlanError(
                "placement-folder",
                f"{len(written)} blocks of {nbytes} are to be offloaded to the disk, but no folder is given for them.",
                why=reason,
                fix='give offload_folder="a folder with room", or leave dtype out',
            )
        folder = os.path.abspath(expanded(os.fspath(offload_folder)))
        with writing(f"making {folder}"):
            os.makedirs(folder, exist_ok=True)
        return folder

    def _mapped(self, placed: PlacedBlock) -> bool:
        """Returns whether a block can be memory-mapped from the files as they are."""
        if not self._can_be_mapped:
            return False
        for name in placed.block.parameters:
            if not self.covers(name):
                return False
            saved_dtype = self._weights.entries[self._sources[name]].dtype
            if saved_dtype != self.dtype_of(name):
                return False
        return True

    def values(self, placed: PlacedBlock, file: str | None) -> dict[str, Tensor]:
        """Returns a block's parameters, where its placement keeps them.

        Args:
            placed: the block.
            file: the file to write if the block is offloaded to the disk and cannot be mapped as it is.
        """
        if placed.home == "disk" and self._mapped(placed):
            return {name: read_whole(self._weights, self._sources[name]) for name in placed.block.parameters}
        device = "cpu" if placed.home == "disk" else placed.home
        values = {}
        for name in placed.block.parameters:
            value = self._value(name)
            dtype = self.dtype_of(name) if self.covers(name) else None
            # Without `copy`, `to` returns the tensor itself if device and dtype are the same. That one is mapped from the
            # file, so that weights in memory would depend on the file.
            values[name] = value.to(device, dtype, copy=True)
        if placed.home != "disk":
            return values
        assert file is not None, "check_folder made one"
        with writing(f"writing {file}"), replacing(file) as opened:
            write_safetensors(values, opened)
        written = weights_in_files([file])
        return {name: read_whole(written, name) for name in values}

    def _value(self, name: str) -> Tensor:
        # With `strict=False` a parameter that the files lack keeps the value that the model was built with.
        if name not in self._sources:
            return self.slots.get(name).detach()
        return read_whole(self._weights, self._sources[name])

    def buffers(self, placed: PlacedBlock) -> dict[str, Tensor]:
        """Returns those buffers of a block that the files have."""
        names = {name for name, _, _ in block_buffers(self._model, placed)}
        return {name: self._value(name).to(self.dtype_of(name), copy=True) for name in names & self._sources.keys()}


def _names(mismatch: Mismatch) -> list[str]:
    return [*mismatch.missing, *mismatch.unexpected]


def _check_buffers(model: nn.Module, checkpoint: _Checkpoint) -> None:
    """Reports buffers on the meta device that no file holds, since they would never get values."""
    problems = []
    for name, buffer in model.named_buffers():
        if buffer.is_meta and not checkpoint.covers(name):
            problem = Problem(
                "placement-buffers",
                f"the buffer {name} has no values.",
                why="it is on the meta device, and the files do not contain it",
                fix="give load a function that builds the model: load(lambda: Model(config), ...)",
            )
            problems.append(problem)
    if problems:
        raise PrepareError.of(problems)
