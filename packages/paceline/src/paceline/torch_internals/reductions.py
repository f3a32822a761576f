"""Which nodes of a graph add up a tensor, or compute of several samples together, and what they divide by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Reduction:
    """A node that makes one number of a tensor, or numbers that each depend on several samples.

    Attributes:
        is_mean: whether it divides by `count`; else it adds up.
        sizes: the shape of what it reduces.
        count: what it divides by; a tensor where only the device knows it.
        is_of_columns: whether it adds up the samples, and keeps another dimension.
        is_joint: whether it is no sum over samples at all, as a norm, a maximum or a softmax over them.
    """

    is_mean: bool
    sizes: tuple[int, ...]
    count: float | Tensor
    is_of_columns: bool = False
    is_joint: bool = False


def reduction_of(node: Any, rows: int = 0) -> Reduction | None:
    """What a node reduces to one number, or over its samples; None for another node. Nothing is read from a device.

    Args:
        node: a `grad_fn`, whose backward pass has not run yet.
        rows: the number of samples, by which a dimension of them is known; 0 looks for single numbers only.
    """
    name = node.name()
    if name.startswith(("MeanBackward", "SumBackward")):
        sizes = tuple(node._saved_self_sym_sizes)
        is_mean = name.startswith("Mean")
        dims = _dims_of(node, len(sizes))
        if len(dims) == len(sizes):
            return Reduction(is_mean, sizes, math.prod(sizes))
        if dims == {0} and _are_samples(sizes, rows):
            return Reduction(is_mean, sizes, sizes[0], is_of_columns=True)
        return None
    if name.startswith(_PRODUCTS + _SCATTERED):
        length = _sum_of_product(node) if name.startswith(_PRODUCTS) else _scattered_rows(node)
        adds_samples = rows > 1 and length == rows
        return Reduction(False, (rows,), rows, is_of_columns=True) if adds_samples else None
    if name.startswith(_JOINT):
        sizes = _shape_of_operand(node, 0) or _shape_of_operand(node, 1)
        dims = _dims_of(node, len(sizes))
        is_joint = _are_samples(sizes, rows) or (bool(sizes) and sizes[0] == rows > 1 and len(dims) == len(sizes))
        return Reduction(False, sizes, 1, is_joint=True) if is_joint and 0 in dims else None
    reduction = getattr(node, "_saved_reduction", None)
    # What a gradient of a loss was computed by has its `reduction`, too, but gives a tensor.
    if reduction not in (_MEAN, _SUM) or "BackwardBackward" in name:
        return None
    target = _saved(node, "target")
    if target is None:
        return None
    sizes = tuple(target.shape)
    count: float | Tensor = math.prod(sizes)
    if name.startswith("NllLoss"):
        # `cross_entropy` leaves out targets with `ignore_index`, and weighs targets by their class.
        total_weight = _saved(node, "total_weight")
        if total_weight is None:
            return None
        count = total_weight
    return Reduction(reduction == _MEAN, sizes, count)


def _are_samples(sizes: tuple[int, ...], rows: int) -> bool:
    """Whether the first dimension is that of the samples; with three of them it may be one of positions."""
    return 0 < len(sizes) <= 2 and sizes[0] == rows > 1


def _dims_of(node: Any, ndim: int) -> set[int]:
    """The dimensions that an operation of this node reduces: all, if it has no `dim`."""
    dims = getattr(node, "_saved_dim", None)
    if isinstance(dims, int):
        dims = (dims,)
    if not dims or not ndim:
        return set(range(ndim))
    # Negative numbers are kept without their sign.
    return {(dim - 2**64 if dim >= 2**63 else dim) % ndim for dim in dims}


def _shape_of_operand(node: Any, operand: int) -> tuple[int, ...]:
    """The shape of an operand that has a gradient; empty for another one."""
    operands = node.next_functions
    below, number = operands[operand] if operand < len(operands) else (None, 0)
    return () if below is None else tuple(below._input_metadata[number].shape)


def _sum_of_product(node: Any) -> int | None:
    """The length of the dimension over which a product of matrices adds up, if neither dimension of the result is as long."""
    result = tuple(node._input_metadata[0].shape)
    left, right = _shape_of_operand(node, 0), _shape_of_operand(node, 1)
    if len(result) == 3 and result[0] != 1:
        return None  # many matrices; `einsum` makes one of them of two matrices
    if left:
        length = left[-1]
    elif right:
        length = right[-2] if len(right) > 1 else right[0]
    else:
        return None
    return None if length in result else length


def _scattered_rows(node: Any) -> int | None:
    """The number of rows that are added to some of the rows of the result, if it has another number of them."""
    result, source = tuple(node._input_metadata[0].shape), _shape_of_operand(node, 1)
    return source[0] if source and result and source[0] != result[0] else None


def _saved(node: Any, name: str) -> Any:
    """Returns what a node has saved; None where a hook would have to bring it back.

    The hook of recomputed layers runs them again, and those of copies on the host take their copy away. Both may be called
    once, in the backward pass.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is not None:
        return None
    return getattr(node, f"_saved_{name}")


def divisor_of(node: Any, operand: int) -> float | Tensor | None:
    """The number by which a node divides one of its operands, or by whose inverse it multiplies it; None for another node.

    It is a tensor where only the device knows it, which is not waited for.

    Args:
        node: a `grad_fn`, whose backward pass has not run yet.
        operand: 0 for the first one, 1 for the second one.
    """
    name = node.name()
    if not name.startswith("MulBackward") and not (name.startswith("DivBackward") and operand == 0):
        return None
    other = _saved(node, "self" if operand else "other")
    if isinstance(other, Tensor):
        if other.numel() != 1:
            return None
        other = other.detach()
    elif other is None:
        return None
    if name.startswith("DivBackward"):
        return other if isinstance(other, Tensor) else float(other)
    if isinstance(other, Tensor):
        return 1 / other
    return 1 / float(other) if other else None


_SCATTERED = ("IndexAddBackward", "ScatterAddBackward")
_PRODUCTS = ("MmBackward", "BmmBackward", "MvBackward", "DotBackward")
# Operations whose result for several samples is no sum of numbers, one for each of them.
_JOINT = (
    "LinalgVectorNormBackward", "NormBackward", "DistBackward", "StdBackward", "VarBackward", "StdMeanBackward",
    "VarMeanBackward", "MaxBackward", "MinBackward", "AmaxBackward", "AminBackward", "MedianBackward", "NanmedianBackward",
    "KthvalueBackward", "LogsumexpBackward", "SoftmaxBackward", "LogSoftmaxBackward", "LogcumsumexpBackward", "TopkBackward",
    "SortBackward", "CumsumBackward", "CumprodBackward", "ProdBackward", "LinalgSvdBackward",
)  # fmt: skip
# torch's numbers for `reduction`
_MEAN = 1
_SUM = 2
