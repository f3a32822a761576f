"""Shapes and dtypes of tensors, which ranks exchange before they send the tensors, and placeholders made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.world.tree import Tree, map_leaves


class Spec:
    """Shape and dtype of a tensor. It is no dataclass, since `world.tree` takes those for containers and not for leaves."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and (self.shape, self.dtype) == (other.shape, other.dtype)

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Returns the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device | str, requires_grad: bool = False) -> Tensor:
        """Returns an uninitialized tensor with this shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=requires_grad)

    def placeholder(self, device: torch.device) -> Tensor:
        """Returns a tensor that no result may depend on. It is NaN, so that such a result is noticed."""
        value: float = 0  # integers have no NaN, and may be used as indices
        if self.dtype.is_floating_point:
            value = float("nan")
        return torch.full(self.shape, value, dtype=self.dtype, device=device)


def specs(tree: Tree) -> Tree:
    """Returns a nested structure with a `Spec` for each tensor; objects other than plain values become None."""

    def of(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return Spec.of(leaf)
        if isinstance(leaf, (bool, int, float, str)):
            return leaf
        return None

    return map_leaves(of, tree)


def placeholder(tree: Tree, device: torch.device) -> Tree:
    """Returns a nested structure with a placeholder for each `Spec`."""
    return _map_specs(lambda spec: spec.placeholder(device), tree)


def empty(tree: Tree, device: torch.device | str, requires_grad: bool = False) -> Tree:
    """Returns a nested structure with an uninitialized tensor for each `Spec`; only floating-point ones require gradients."""
    return _map_specs(lambda spec: spec.empty(device, requires_grad and spec.dtype.is_floating_point), tree)


def _map_specs(change: Callable[[Spec], Tensor], tree: Tree) -> Tree:
    def changed(leaf: object) -> object:
        return change(leaf) if isinstance(leaf, Spec) else leaf

    return map_leaves(changed, tree)


@dataclass(frozen=True)
class Described:
    """A tensor of a state dict, without its values."""

    spec: Spec
    on_cpu: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Described:
        return cls(Spec.of(tensor), tensor.device.type == "cpu")

    def empty(self, device: torch.device) -> Tensor:
        if self.on_cpu:
            return self.spec.empty("cpu")
        return self.spec.empty(device)
