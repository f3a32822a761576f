"""`Form` describes a structure of tensors: what ranks must agree on before they exchange it. It is computed only once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.world import tree as trees
from paceline.world.arrived import Topic
from paceline.world.tree import Tree

_MOST = 1024  # how many forms are kept; there are only more if the shapes of a loop never repeat


@dataclass(frozen=True, slots=True)
class Form:
    """The form of one structure in one operation.

    Attributes:
        topic: the operation, and the structure's containers, dtypes and shapes.
        on_cpu: indices of the leaves that lie on the CPU.
        on_device: indices of the leaves that lie on the device.
    """

    topic: Topic
    on_cpu: tuple[int, ...]
    on_device: tuple[int, ...]


class Forms:
    """Keeps the forms that this process has seen, because a loop gathers the same structure again and again.

    Args:
        device: where tensors may lie besides the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.kinds = {"cpu", device.type}
        self._forms: dict[Any, Form] = {}

    def of(self, op: str, tree: Tree, exact: bool = False) -> tuple[list[Any], Form | None, list[str]]:
        """Returns the leaves of `tree`, its form, and what cannot be sent; the form is None if something cannot.

        Args:
            op: the operation.
            tree: a structure of tensors.
            exact: whether ranks must agree in dim 0 too.
        """
        leaves: list[Any] = []
        key = (op, _key(tree, leaves, exact))
        form = self._forms.get(key)
        if form is not None:
            return leaves, form, []
        problems = []
        for path, leaf in trees.walk(tree):
            if not self._takes(leaf):
                problems.append(f"{path or 'the value'} is {_kind(leaf)}")
        if problems:
            return leaves, None, problems
        # A loop whose shapes never repeat must not fill the memory.
        if len(self._forms) >= _MOST:
            self._forms.clear()
        texts = ", ".join(_text(leaf, exact) for leaf in leaves)
        on_cpu: list[int] = []
        on_device: list[int] = []
        for place, leaf in enumerate(leaves):
            places = on_cpu if leaf.device.type == "cpu" else on_device
            places.append(place)
        form = Form(Topic(op, described(tree, texts)), tuple(on_cpu), tuple(on_device))
        self._forms[key] = form
        return leaves, form, []

    def _takes(self, leaf: object) -> bool:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_quantized:
            return False
        return leaf.device.type in self.kinds and not hasattr(leaf, "full_tensor")


def described(tree: Tree, texts: str) -> str:
    """Returns the structure of `tree` and the text about its leaves, for messages; of a single tensor only that text."""
    return texts if isinstance(tree, Tensor) else f"{trees.structure(tree)} of {texts}"


def dtype_name(leaf: Tensor) -> str:
    """`float32`, `int64`, ..."""
    return str(leaf.dtype).removeprefix("torch.")


def _key(tree: Tree, leaves: list[Any], exact: bool) -> Any:
    """Returns a key for the form of `tree`, with everything that `Forms.of` reads; appends the leaves to `leaves`.

    This runs at each collective, so it does no more than necessary.
    """
    if isinstance(tree, Tensor):
        leaves.append(tree)
        shape = tree.shape
        return type(tree), tree.dtype, tree.layout, tree.device, len(shape), shape if exact else shape[1:]
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind, *[_key(child, leaves, exact) for child in tree]
    children = trees.children(tree)
    if children is None:
        leaves.append(tree)
        return kind
    keys = trees.keys(tree) or ()
    return kind, *keys, *[_key(child, leaves, exact) for child in children]


def _text(leaf: Tensor, exact: bool) -> str:
    """Returns the dtype, the shape and the kind of device as text; dim 0 is `*` unless ranks must agree in it."""
    sizes = [str(size) for size in leaf.shape]
    if sizes and not exact:
        sizes[0] = "*"
    text = f"{dtype_name(leaf)}[{', '.join(sizes)}]"
    if leaf.device.type == "cpu":
        return text
    return f"{text}@{leaf.device.type}"


def _kind(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    return f"a {type(leaf).__name__} ({dtype_name(leaf)}, {leaf.layout}, on {leaf.device})"
