"""A state as JSON and tensors: what a checkpoint can hold, and nothing that could run code when it is read.

Tensors leave the tree and are known by the path at which they stood; the rest becomes JSON, where a value that JSON
lacks is an object with one key that begins with `$`:

    {"lr": 0.1, "betas": (0.9, 0.99), "exp_avg": tensor}
    {"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}, "exp_avg": {"$tensor": "optimizers/0/exp_avg"}}

A tensor that is made of others, such as an 8-bit state, is an object of these: {"$subclass": {"type": ..., "parts": {...}}}.
"""

from __future__ import annotations

import base64
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from paceline.base.errors import CheckpointError, Problem
from paceline.world.sharded import is_made_of_tensors

_PLAIN = (type(None), bool, int, float, str)


class Encoder:
    """Turns states into JSON values, collecting the tensors on the way and the values that cannot be held.

    Attributes:
        tensors: by path.
        problems: one `checkpoint-value` for each value that was refused.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.problems: list[Problem] = []

    def encode(self, value: Any, path: str) -> Any:
        """JSON for `value`, which stands at `path`."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if is_made_of_tensors(value):
            return {"$subclass": self._subclass(value, path)}
        if isinstance(value, Tensor):
            return {"$tensor": self.add_tensor(path, value.detach())}
        if kind is list:
            return self.items(value, path)
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc" and value.dtype.isnative:
            # `from_numpy` takes neither negative strides nor, without a warning, memory that cannot be written to.
            return {"$ndarray": self.add_tensor(path, torch.from_numpy(value.copy()))}
        if isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
            return {"$numpy": [value.dtype.str, value.item()]}
        # JSON has only text as keys, and a key with a `$` would be read as the name of a kind.
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}/{key}") for key, item in value.items()}
        # By the very type: what a subclass adds would be lost.
        if kind in _MAPPINGS:
            return {_MAPPINGS[kind]: self.pairs(value, path)}
        if kind is Namespace:
            return {"$namespace": self.pairs(vars(value), path)}
        if kind is tuple:
            return {"$tuple": self.items(value, path)}
        if kind in (set, frozenset):
            # A set has no order of its own, and ranks with equal sets must write equal JSON.
            return {f"${kind.__name__}": self.items(sorted(value, key=repr), path)}
        if kind in _VALUES:
            tag, json_of = _VALUES[kind]
            return {tag: json_of(value)}
        self.problems.append(_refused(value, path))
        return None

    def items(self, values: Iterable[object], path: str) -> list[Any]:
        """JSON for each of some values."""
        return [self.encode(item, f"{path}/{index}") for index, item in enumerate(values)]

    def pairs(self, mapping: Mapping[Any, Any], path: str) -> list[Any]:
        """JSON for keys of any kind with their values."""
        pairs = []
        for key, item in mapping.items():
            pairs.append([self.encode(key, f"{path}/key"), self.encode(item, f"{path}/{key}")])
        return pairs

    def _subclass(self, value: Tensor, path: str) -> dict[str, Any]:
        """JSON of a tensor that is made of others, which are kept each by its own path."""
        kind = type(value)
        if _subclass_named(_full_name(kind)) is not kind:
            self.problems.append(_refused(value, path))
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: self.encode(getattr(value, name), f"{path}/{name}") for name in names}
        encoded_context = self.encode(context, f"{path}/context")
        return {"type": _full_name(kind), "parts": parts, "context": encoded_context, "shape": list(value.shape)}

    def add_tensor(self, path: str, tensor: Tensor) -> str:
        """Keeps a tensor, which stands at `path`; returns the path by which it is known."""
        if tensor.layout != torch.strided or tensor.is_quantized:
            self.problems.append(_refused(tensor, path))
        while path in self.tensors:
            path += "'"  # keys of two types may read alike, such as 1 and "1"
        self.tensors[path] = tensor
        return path


_MAPPINGS: dict[type, str] = {dict: "$dict", defaultdict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
# Types with nothing inside that must be encoded: the tag, and what turns a value into JSON.
_VALUES: dict[type, tuple[str, Callable[[Any], object]]] = {
    torch.Size: ("$size", list),
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("$complex", lambda value: [value.real, value.imag]),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
}


def _subclass_named(name: str) -> type | None:
    """Returns a class of tensors by its full name, if its library has told torch that reading it is safe.

    So a file names no code that the script has not imported for this use.
    """
    for kind in torch.serialization.get_safe_globals():
        if isinstance(kind, type) and _full_name(kind) == name and hasattr(kind, "__tensor_unflatten__"):
            return kind
    return None


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _refused(value: object, path: str) -> Problem:
    kind = _full_name(type(value))
    return Problem(
        "checkpoint-value",
        f"{path} is a {kind}, which a checkpoint cannot hold.",
        why="a checkpoint holds tensors, arrays, numbers, text and the built-in containers, so that reading one runs "
        "no code",
        fix="return its numbers from `state_dict()`, and build the object again from them in `load_state_dict()`",
    )


def decode(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the value that `Encoder.encode` was given.

    Args:
        value: JSON.
        tensors: those that `references` names, by path.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    content = value[tag]
    if tag == "$tensor":
        return tensors[content]
    if tag == "$ndarray":
        return tensors[content].numpy()
    if tag == "$subclass":
        return _put_together(content, tensors)
    reader = _READERS.get(tag)
    if reader is None:
        raise CheckpointError(
            "checkpoint-damaged",
            f"state.json holds a value of an unknown kind {tag!r}.",
            why=f"known kinds: {', '.join(_READERS)}",
            fix="load another checkpoint; this one was edited or written by a newer Paceline",
        )
    return reader(decode(content, tensors))


def _put_together(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    kind = _subclass_named(saved["type"])
    if kind is None:
        raise CheckpointError(
            "checkpoint-subclass",
            f"the checkpoint holds tensors of the class {saved['type']}, which is not known here.",
            why="only classes that their library has registered with `torch.serialization.add_safe_globals` are read, which "
            "it does where it is imported",
            fix="construct the optimizer that the saved run had, before `load_state`",
        )
    shape = torch.Size(saved["shape"])
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))  # those of a contiguous tensor
    parts, context = decode(saved["parts"], tensors), decode(saved["context"], tensors)
    tensor: Tensor = kind.__tensor_unflatten__(parts, context, shape, strides)  # type: ignore[attr-defined]
    return tensor


def _dtype(name: str) -> torch.dtype:
    # Not by `getattr` alone: a name in a file that was edited may be that of a function.
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


_READERS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$tuple": tuple,
    "$size": torch.Size,
    "$namespace": lambda pairs: Namespace(**dict(pairs)),
    "$set": set,
    "$frozenset": frozenset,
    "$bytes": base64.b64decode,
    "$complex": lambda parts: complex(*parts),
    "$dtype": _dtype,
    "$device": torch.device,
    "$numpy": lambda parts: numpy.dtype(parts[0]).type(parts[1]),
}


def references(value: object) -> Iterator[str]:
    """Paths of the tensors that a JSON value speaks of."""
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        for tag, item in value.items():
            if tag in ("$tensor", "$ndarray"):
                yield item
            else:
                yield from references(item)
