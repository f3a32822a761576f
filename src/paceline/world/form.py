"""The form of a structure of tensors: what ranks must agree about before they exchange it, worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.world import tree as trees
from paceline.world.exchange import Topic
from paceline.world.tree import Tree

_MOST = 1024  # how many are remembered; more only come where shapes never repeat


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of a structure.

    Attributes:
        topic: the operation, and the structure's containers, dtypes and shapes.
        on_cpu, on_device: which leaves lie on the CPU, and which on the device.
    """

    topic: Topic
    on_cpu: tuple[int, ...]
    on_device: tuple[int, ...]


class Forms:
    """The forms that this process has seen: a loop gathers the same structure again and again.

    Args:
        device: where tensors may lie besides the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.kinds = {"cpu", device.type}
        self._forms: dict[Any, Form] = {}

    def of(self, op: str, tree: Tree, exact: bool = False) -> tuple[list[Any], Form | None, list[str]]:
        """The leaves of `tree` and its form; or no form, and what cannot be sent.

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
    """The structure of `tree` and what its leaves are, for people; a tensor alone has no structure to speak of."""
    return texts if isinstance(tree, Tensor) else f"{trees.structure(tree)} of {texts}"


def dtype_name(leaf: Tensor) -> str:
    """`float32`, `int64`, ..."""
    return str(leaf.dtype).removeprefix("torch.")


def _key(tree: Tree, leaves: list[Any], exact: bool) -> Any:
    """The form of `tree` as something to look up, all that decides what `Forms.of` finds; collects the leaves."""
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
    """Dtype and shape for people, dim 0 only where it must agree, and the kind of device."""
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
