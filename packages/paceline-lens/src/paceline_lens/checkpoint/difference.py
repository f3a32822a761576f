"""How two checkpoints differ: names, shapes, dtypes, values; one tensor of each is in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.format.checkpoint_format import format_of
from paceline.checkpoint.format.manifest import STATE, Manifest, read_json
from paceline.checkpoint.format.shards import read_index, read_shards, shapes
from paceline.checkpoint.store import Store
from paceline.checkpoint.weights.opening import open_weights
from paceline.checkpoint.weights.sources import SafeWeights, Weights, read_whole
from paceline_lens.checkpoint.listing import home_of, the_checkpoint

_MODELS = "models/"
_MODEL = "models/model/"


@dataclass(frozen=True)
class Unlike:
    """A tensor that both sides have, but not with the same values, shape or dtype.

    Attributes:
        name: its path.
        shapes, dtypes: of both sides.
        largest: largest absolute difference of two values; None where the shapes differ.
        relative: the same, as a part of the largest absolute value of the first side.
        count: values that differ by more than the tolerance.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    largest: float | None = None
    relative: float | None = None
    count: int = 0


class Saved:
    """A checkpoint of ours.

    Args:
        store, home: where it lies.

    Raises:
        CheckpointError: `checkpoint-damaged`, `checkpoint-unsafe`.
    """

    def __init__(self, store: Store, home: str) -> None:
        manifest = Manifest.read(store, home)
        self._store = store
        self._files = manifest.files
        self._place = manifest.place(store, home)
        self._index = read_index(store, self._place)
        self.facts = shapes(self._index)
        self.values = dict(leaves(read_json(store, store.join(self._place, STATE))))

    def read(self, name: str) -> Tensor:
        """Returns a whole tensor, on the CPU."""
        shape, dtype = self.facts[name]
        tensor = torch.empty(shape, dtype=dtype)
        read_shards(self._store, self._place, self._index, self._files, {name: tensor})
        return tensor


class ModelAlone:
    """Weights without the state of a run; their names are those of `models/model/` in a checkpoint of ours."""

    def __init__(self, weights: Weights) -> None:
        self.values: dict[str, Any] = {}
        self.facts: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for name, tensor in weights.entries.items():
            self.facts[f"{_MODEL}{name}"] = torch.Size(tensor.shape), tensor.dtype
        self._weights = weights

    def read(self, name: str) -> Tensor:
        """Returns a whole tensor, on the CPU."""
        return read_whole(self._weights, name.removeprefix(_MODEL))


Side = Saved | ModelAlone


def side(path: str) -> Side:
    """Opens what lies at a path: a checkpoint, or safetensors in a file or a folder.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-none`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """
    store, home = home_of(path)
    checkpoint_format = format_of(store, home)
    if checkpoint_format is not None and checkpoint_format.has_manifest:
        return Saved(store, home)
    if checkpoint_format is not None:
        return ModelAlone(open_weights(home))
    names = sorted(os.listdir(home)) if os.path.isdir(home) else [home]
    files = [os.path.join(home, name) for name in names if name.endswith(".safetensors")]
    if not files:
        the_checkpoint(path)  # raises the error that says what is missing
    return ModelAlone(SafeWeights(files))


@dataclass(frozen=True)
class Difference:
    """What differs between two sides.

    Attributes:
        only: for each side, the names of tensors that the other one lacks.
        unlike: tensors that both have and that differ.
        values: JSON values that differ: name -> the values of both sides, `...` for a side that lacks it.
        compared: the number of tensors that both have.
    """

    only: tuple[tuple[str, ...], tuple[str, ...]]
    unlike: tuple[Unlike, ...]
    values: Mapping[str, tuple[Any, Any]]
    compared: int

    def __bool__(self) -> bool:
        return bool(self.only[0] or self.only[1] or self.unlike or self.values)


def difference(first: Side, other: Side, atol: float = 0.0, seen: Callable[[int], None] | None = None) -> Difference:
    """Compares two sides. If one of them is a model alone, only the models of the other one are compared.

    Args:
        first, other: `side(path)`.
        atol: values that differ by no more count as equal.
        seen: called after each tensor with its size in bytes.
    """
    names = set(first.facts)
    other_names = set(other.facts)
    value_names = first.values.keys() | other.values.keys()
    # A model alone has no values, and nothing to compare with optimizers and other state.
    if not (first.values and other.values):
        names = {name for name in names if name.startswith(_MODELS)}
        other_names = {name for name in other_names if name.startswith(_MODELS)}
        value_names = set()
    unlike = []
    for name in sorted(names & other_names):
        tensor = first.read(name)
        differs = _compare(name, tensor, other.read(name), atol)
        if differs is not None:
            unlike.append(differs)
        if seen is not None:
            seen(tensor.nbytes)
    values = {}
    for name in sorted(value_names):
        pair = (first.values.get(name, ...), other.values.get(name, ...))
        if not _same(*pair, atol):
            values[name] = pair
    only = (tuple(sorted(names - other_names)), tuple(sorted(other_names - names)))
    return Difference(only, tuple(unlike), values, len(names & other_names))


def _compare(name: str, tensor: Tensor, other: Tensor, atol: float) -> Unlike | None:
    dtypes = (str(tensor.dtype).removeprefix("torch."), str(other.dtype).removeprefix("torch."))
    both_shapes = (tuple(tensor.shape), tuple(other.shape))
    if tensor.shape != other.shape:
        return Unlike(name, both_shapes, dtypes)
    if tensor.dtype == other.dtype and torch.equal(tensor, other):
        return None
    # In double precision no difference of two floating-point values is rounded to 0. It would round integers above 2**53.
    wide = torch.float64
    if tensor.is_complex() or other.is_complex():
        wide = torch.complex128
    elif not tensor.is_floating_point() and not other.is_floating_point():
        wide = torch.int64
    first = tensor.to(wide)
    second = other.to(wide)
    # Where both are NaN, or infinite alike, their difference is NaN and they are equal.
    equal = (first == second) | (first.isnan() & second.isnan())
    distances = (first - second).abs().masked_fill(equal, 0.0)
    beyond = ~(distances <= atol)  # not `>`: a NaN on one side only compares as false, and differs
    if tensor.dtype == other.dtype and not beyond.any():
        return None
    if not first.numel():
        return Unlike(name, both_shapes, dtypes, 0.0, 0.0)
    largest = float(distances.nan_to_num(nan=float("inf")).max())
    scale = float(first.abs().max())
    if scale:
        relative = largest / scale
    else:
        relative = math.inf if largest else 0.0
    return Unlike(name, both_shapes, dtypes, largest, relative, int(beyond.sum()))


def _same(value: Any, other: Any, atol: float) -> bool:
    if value == other or (value != value and other != other):  # NaN is no number that equals itself
        return True
    # By the very type: a bool is an int, too, and no tolerance makes it equal to a number.
    numbers = (int, float)
    return type(value) in numbers and type(other) in numbers and bool(abs(value - other) <= atol)


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a JSON tree with their paths. A list is one value, and so is `{"$tensor": ...}`."""
    if isinstance(tree, dict) and not any(key.startswith("$") for key in tree):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}" if path else key)
    else:
        yield path, tree
