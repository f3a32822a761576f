"""Functions for nested batches: tensors in dicts, lists, tuples, namedtuples, dataclasses and any other `Mapping`.

A container keeps its class, its keys and their order. Whatever is neither a container nor a tensor (a string, a number,
None, an object of the user's) is a leaf too, and is not changed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Tree = Any


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Returns a copy of `tree` with `fn` applied to each leaf, in order."""
    # Most batches consist of these types alone. They are handled here because `children` and `rebuild` take longer.
    kind = type(tree)
    if isinstance(tree, Tensor):
        return fn(tree)
    if kind is dict:
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if kind is list:
        return [map_leaves(fn, value) for value in tree]
    if kind is tuple:
        return tuple([map_leaves(fn, value) for value in tree])
    inner = children(tree)
    if inner is None:
        return fn(tree)
    return rebuild(tree, [map_leaves(fn, value) for value in inner])


def map_tensors(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Returns a copy of `tree` with `fn` applied to each tensor; other leaves stay as they are."""
    if isinstance(tree, Tensor):
        return fn(tree)

    def mapped(leaf: object) -> object:
        return fn(leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(mapped, tree)


def leaves(tree: Tree) -> list[Any]:
    """All leaves in order, those that are no tensors included."""
    if isinstance(tree, Tensor):
        return [tree]
    collected: list[Any] = []
    _collect(tree, collected)
    return collected


def tensors(tree: Tree) -> list[Tensor]:
    """Returns the tensors of `tree`, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Returns the storage of a tensor. A sparse tensor has none, nor has one in a function of `torch.func`."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def has_only_tensors(tree: Tree) -> bool:
    """Returns whether every leaf is a tensor."""
    return all(isinstance(leaf, Tensor) for leaf in leaves(tree))


def unflatten(structure: Tree, values: Iterable[Any]) -> Tree:
    """Puts `values` where the leaves of `structure` are, in the order of `leaves`."""
    rest = iter(values)
    return map_leaves(lambda _: next(rest), structure)


def describe(tree: Tree) -> str:
    """Returns the structure in one line: containers, keys, and for each tensor its dtype and shape."""
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    return _text(tree, describe)


def structure(tree: Tree) -> str:
    """Containers and keys in one line, with `_` for each tensor."""
    if isinstance(tree, Tensor):
        return "_"
    return _text(tree, structure)


def all_on(tree: Tree, device: torch.device) -> bool:
    """Returns whether `to_device` would change nothing: all tensors are there, and no other leaf has a `to` of its own."""
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            if leaf.device != device:
                return False
        elif callable(getattr(leaf, "to", None)):
            return False
    return True


def to_device(tree: Tree, device: torch.device | str, non_blocking: bool = False) -> Tree:
    """Returns a copy of `tree` with every tensor on `device`; a tensor that is there already is not copied.

    An object that is no container and has a `to` method of its own (a packed sequence, a graph batch) is moved by it.
    """
    target = torch.device(device)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(target, non_blocking=non_blocking)
        to = getattr(leaf, "to", None)
        if not callable(to):
            return leaf
        return to(target)

    return map_leaves(move, tree)


def first_rows(tree: Tree) -> int | None:
    """Returns the length along dim 0 of the first tensor that has a dim, which is the batch size of most batches.

    Returns None if no tensor has a dim.
    """
    for leaf in tensors(tree):
        if leaf.ndim:
            return leaf.shape[0]
    return None


def common_rows(tree: Tree) -> int | None:
    """Returns the length along dim 0 that all tensors with a dim share; None if they differ, or if there is none."""
    lengths = {leaf.shape[0] for leaf in tensors(tree) if leaf.ndim}
    return lengths.pop() if len(lengths) == 1 else None


def _collect(tree: Tree, collected: list[Any]) -> None:
    """Appends the leaves of `tree` to a list; like `map_leaves`, it handles the most common types first."""
    kind = type(tree)
    values: Iterable[Any] | None
    if kind is dict:
        values = tree.values()
    elif kind is list or kind is tuple:
        values = tree
    else:
        values = children(tree)
        if values is None:
            collected.append(tree)
            return
    for value in values:
        if isinstance(value, Tensor):
            collected.append(value)
        else:
            _collect(value, collected)


def children(tree: Tree) -> list[Any] | None:
    """Returns the values directly inside a container, in order; None for a leaf."""
    if isinstance(tree, Tensor | str | bytes | int | float | complex | type(None)):
        return None
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, list):
        return list(tree)
    if isinstance(tree, tuple):
        # A packed sequence must keep its lengths on the CPU, so that only its own `to` may move it.
        if callable(getattr(tree, "to", None)):
            return None
        return list(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not callable(getattr(tree, "to", None)):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return None


def keys(tree: Tree) -> list[Any] | None:
    """Returns the names of a container's children, in order; None if they have no names."""
    if isinstance(tree, Mapping):
        return list(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(tree._fields)
    if dataclasses.is_dataclass(tree):
        return [field.name for field in dataclasses.fields(tree)]
    return None


def _text(tree: Tree, of: Callable[[Tree], str]) -> str:
    """Writes a container with the text `of(child)` of each child in its own kind of brackets; a leaf as its class."""
    kind = type(tree).__name__
    inner = children(tree)
    if inner is None:
        return kind
    names = keys(tree)
    texts = [of(child) for child in inner]
    if names is not None:
        texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
    name = kind
    if kind in ("dict", "list", "tuple"):
        name = ""  # the brackets say which of these it is
    inside = ", ".join(texts)
    if isinstance(tree, list):
        return f"{name}[{inside}]"
    if isinstance(tree, Mapping):
        return f"{name}{{{inside}}}"
    return f"{name}({inside})"


def rebuild(tree: Tree, values: list[Any]) -> Tree:
    """Returns a container like `tree` with other values.

    A mutable container is copied and filled, because the constructor of a user's class may take other arguments, or set
    attributes that would be lost.
    """
    if isinstance(tree, tuple):
        if hasattr(tree, "_fields"):  # a namedtuple takes one argument for each field
            return type(tree)(*values)
        return type(tree)(values)
    if isinstance(tree, Mapping) and not hasattr(tree, "__setitem__"):
        return type(tree)(dict(zip(tree, values, strict=True)))  # type: ignore[call-arg]
    new = copy.copy(tree)
    if isinstance(tree, Mapping):
        for key, value in zip(list(tree), values, strict=True):
            new[key] = value
    elif isinstance(tree, list):
        new[:] = values
    else:
        for field, value in zip(dataclasses.fields(tree), values, strict=True):
            object.__setattr__(new, field.name, value)  # a frozen dataclass refuses `setattr`
    return new


def walk(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each leaf after its path, such as `("batch.labels[0]", tensor)`, for messages."""
    inner = children(tree)
    if inner is None:
        yield path, tree
        return
    names = keys(tree)
    for number, child in enumerate(inner):
        step = f"[{number}]"
        if names is not None:
            step = f".{names[number]}" if path else str(names[number])
        yield from walk(child, path + step)
