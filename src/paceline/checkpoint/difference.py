"""How two checkpoints differ: names, shapes, dtypes, values; one tensor of each is in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.listing import home_of, is_checkpoint, the_checkpoint
from paceline.checkpoint.manifest import Manifest, read_json
from paceline.checkpoint.shards import read_index, read_shards, shapes

_MODELS = "models/"
_ENDING = ".safetensors"


@dataclass(frozen=True)
class Unlike:
    """A tensor that both have and that is not the same.

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


class Side(Protocol):
    """Tensors by name, read one at a time, and the JSON values beside them."""

    facts: Mapping[str, tuple[torch.Size, torch.dtype]]
    values: Mapping[str, Any]

    def read(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU."""


class Saved:
    """A checkpoint.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-none`, `checkpoint-damaged`, `checkpoint-unsafe`.
    """

    def __init__(self, path: str) -> None:
        self._store, home = the_checkpoint(path)
        manifest = Manifest.read(self._store, home)
        self._files, self._place = manifest.files, manifest.place(self._store, home)
        self._index = read_index(self._store, self._place)
        self.facts = shapes(self._index)
        self.values = dict(leaves(read_json(self._store, self._store.join(self._place, "state.json"))))

    def read(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU."""
        shape, dtype = self.facts[name]
        tensor = torch.empty(shape, dtype=dtype)
        read_shards(self._store, self._place, self._index, self._files, {name: tensor})
        return tensor


class Weights:
    """A file or folder of safetensors: a model alone, whose names are those of `models/model/` in a checkpoint.

    Raises:
        CheckpointError: `checkpoint-none`, `checkpoint-damaged`.
    """

    def __init__(self, home: str) -> None:
        names = sorted(os.listdir(home)) if os.path.isdir(home) else [home]
        paths = [os.path.join(home, name) for name in names if name.endswith(_ENDING)]
        if not paths:
            the_checkpoint(home)  # raises: it has no manifest
        from safetensors import safe_open

        from paceline.checkpoint.files import reading

        self.values: dict[str, Any] = {}
        self.facts: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            with reading(path):
                file: Any = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    part = file.get_slice(name)
                    empty = part[0:0] if part.get_shape() else file.get_tensor(name)
                    self.facts[f"{_MODELS}model/{name}"] = (torch.Size(part.get_shape()), empty.dtype)
                    self._files[f"{_MODELS}model/{name}"] = file

    def read(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU."""
        found: Tensor = self._files[name].get_tensor(name.removeprefix(f"{_MODELS}model/"))
        return found


def side(path: str) -> Saved | Weights:
    """What lies at a path: a checkpoint, or else safetensors."""
    store, home = home_of(path)
    if "://" in home or is_checkpoint(store, home):
        return Saved(path)
    return Weights(home)


@dataclass(frozen=True)
class Difference:
    """What differs between two sides.

    Attributes:
        only: names of tensors on one side alone.
        unlike: tensors that both have and that are not the same.
        values: JSON values that differ, with both sides; `...` where one lacks it.
        compared: how many tensors both have.
    """

    only: tuple[tuple[str, ...], tuple[str, ...]]
    unlike: tuple[Unlike, ...]
    values: Mapping[str, tuple[Any, Any]]
    compared: int

    def __bool__(self) -> bool:
        return bool(self.only[0] or self.only[1] or self.unlike or self.values)


def difference(one: Side, other: Side, atol: float = 0.0, seen: Callable[[int], None] | None = None) -> Difference:
    """Compares two sides; where one is a model alone, the other's models alone count.

    Args:
        one, other: `side(path)`.
        atol: values that differ by no more count as equal.
        seen: told how many bytes were compared, again and again.
    """
    alone = not (one.values and other.values)
    names = [{name for name in each.facts if not alone or name.startswith(_MODELS)} for each in (one, other)]
    unlike = []
    for name in sorted(names[0] & names[1]):
        tensor = one.read(name)
        found = _compare(name, tensor, other.read(name), atol)
        if found is not None:
            unlike.append(found)
        if seen is not None:
            seen(tensor.nbytes)
    values = {}
    for name in [] if alone else sorted(one.values.keys() | other.values.keys()):
        pair = one.values.get(name, ...), other.values.get(name, ...)
        if not _same(*pair, atol):
            values[name] = pair
    only = tuple(sorted(names[0] - names[1])), tuple(sorted(names[1] - names[0]))
    return Difference(only, tuple(unlike), values, len(names[0] & names[1]))


def _compare(name: str, one: Tensor, other: Tensor, atol: float) -> Unlike | None:
    dtypes = str(one.dtype).removeprefix("torch."), str(other.dtype).removeprefix("torch.")
    shapes_ = tuple(one.shape), tuple(other.shape)
    if one.shape != other.shape:
        return Unlike(name, shapes_, dtypes)
    if one.dtype == other.dtype and torch.equal(one, other):
        return None
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    # Where both are NaN, or infinite alike, their difference is NaN and they are equal.
    alike = (first == second) | (first.isnan() & second.isnan())
    apart = (first - second).abs().masked_fill(alike, 0.0)
    beyond = ~(apart <= atol)
    if one.dtype == other.dtype and not beyond.any():
        return None
    largest = float(apart.nan_to_num(nan=float("inf")).max()) if apart.numel() else 0.0
    scale = float(first.abs().max()) if first.numel() else 0.0
    relative = largest / scale if scale else (0.0 if largest == 0.0 else float("inf"))
    return Unlike(name, shapes_, dtypes, largest, relative, int(beyond.sum()))


def _same(one: Any, other: Any, atol: float) -> bool:
    numbers = all(type(each) in (int, float) for each in (one, other))
    return bool(one == other or (numbers and abs(one - other) <= atol) or (one != one and other != other))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a JSON tree by their paths; a list is one value, and so is what stands for a kind that JSON lacks."""
    if isinstance(tree, dict) and not any(key.startswith("$") for key in tree):
        for key, value in tree.items():
            yield from leaves(value, f"{path}/{key}" if path else key)
    else:
        yield path, tree
