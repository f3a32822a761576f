"""Notices a loss that is no mean over the samples of its micro-batch, where it can be seen.

`cross_entropy` leaves out targets with `ignore_index`, and weighs targets by the `weight` of their class. It divides by what
is left, which each micro-batch of each rank has another number of. So does a mean that a script takes over a mask. A sum over
samples that nothing divides would be averaged over ranks, as each loss is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from paceline.base.log import warn_once
from paceline.torch_internals.tensors import (
    divisor_of,
    is_loss_function,
    rows_of_selected_mean,
    sizes_of_sum,
    targets_of_mean,
)
from paceline.world.places import user_frame

_PASSES = 3  # the first backward passes of a run are looked at: on an accelerator, to look waits for the device
_NODES = 32  # of the graph behind a loss; losses are a few sums and factors away from their mean
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Sum", "Mean", "Stack", "Unsqueeze", "Squeeze", "View")
# What penalties on weights do to them before they add up.
_ELEMENTWISE = ("Pow", "Abs", "Sub", "Add", "Mul", "Neg", "ToCopy", "Clone", "LogBackward", "ExpBackward")
_SUM_TEXT = (
    "a loss is a sum over the samples of its micro-batch. Losses of processes and micro-batches are averaged, so its gradients "
    "depend on their number. For the mean of n samples write `accelerator.backward(loss, num_items=n)`; for the sum over all "
    "processes, `accelerator.backward(loss, num_items=1 / accelerator.num_processes)`"
)
_TEXT = (
    "a loss is the mean of `cross_entropy` over only some targets, or over their weights (`ignore_index`, `weight`). Each "
    "process and micro-batch divides by its own number, so the result depends on how the samples are divided. With n for "
    "that number, such as `(labels != -100).sum()` or `weight[labels].sum()`, this is exact: "
    "`accelerator.backward(loss * n, num_items=n)`"
)


_PART_TEXT = (
    "a loss is a mean over only a part of its micro-batch, or a sum that is divided by another number than that of its "
    "samples. Each process and micro-batch divides by its own number, so the result depends on how the samples are divided. "
    "With n for that number, such as `mask.sum()`, this is exact: `accelerator.backward(loss * n, num_items=n)`"
)

_GLOBAL_TEXT = (
    "a sum over the samples of a micro-batch is divided by {all}, the number of samples of all processes together. Losses of "
    "processes are averaged, so its gradients are {width} times as small as on one process. Divide by the samples of this "
    "process, such as `len(x)`, here {rows}; where you mean the factor {width}, nothing is wrong"
)


def look(loss: Tensor, passes: int, rows: int, width: int = 1) -> None:
    """Warns once if such a mean or sum is a part of a loss.

    Args:
        loss: its backward pass has not run yet.
        passes: number of backward passes of the run.
        rows: number of samples that this rank has in the micro-batch.
        width: number of ranks whose losses are averaged.
    """
    if passes > _PASSES or not rows:
        return
    text = _told(loss, rows, width)
    if text is None:
        return
    frame = user_frame()
    place = "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"
    warn_once("train", text + place)


def _told(loss: Tensor, rows: int, width: int) -> str | None:
    """Returns what is to be said of a loss."""
    waiting: list[tuple[Any, tuple[float, ...], bool]] = [(loss.grad_fn, (), False)]
    for _ in range(_NODES):
        if not waiting:
            return None
        # A node, what its result is multiplied and divided by, and whether it is divided.
        node, divisors, is_divided = waiting.pop()
        if node is None:
            continue
        targets = targets_of_mean(node)
        if targets is not None and targets[0] != targets[1]:
            return _TEXT
        selected = rows_of_selected_mean(node)
        if selected is not None and selected % rows:
            return _PART_TEXT
        sizes = sizes_of_sum(node)
        if sizes is not None and not _is_counted(node, sizes, divisors, rows):
            return _PART_TEXT if is_divided else _SUM_TEXT
        if sizes is not None and _counts_all_ranks(node, sizes, divisors, rows, width):
            return _GLOBAL_TEXT.format(all=rows * width, width=width, rows=rows)
        # The mean of several losses, or of a loss for each sample, divides by nothing that differs.
        if not node.name().startswith(_ARITHMETIC) or node.name().startswith("Mean"):
            continue
        for operand, (below, _) in enumerate(node.next_functions):
            divisor = divisor_of(node, operand)
            factors = divisors if divisor is None else (*divisors, divisor)
            waiting.append((below, factors, is_divided or node.name().startswith("Div")))
    return None


def _is_counted(node: Any, sizes: tuple[int, ...], divisors: Sequence[float], rows: int) -> bool:
    """Returns whether a node that adds up is divided by the number of its samples, or does not add up over samples."""
    if _is_of_weights(node) or _counts(sizes, divisors, rows):
        return True
    if is_loss_function(node):
        return False
    # Divided by a number that is known to be none of its samples, tokens of all samples may have become one dimension.
    if not sizes:
        return True
    return sizes[0] % rows != 0 if divisors else sizes[0] != rows


def _counts(sizes: Sequence[int], divisors: Sequence[float], rows: int) -> bool:
    """Returns whether a sum is divided by the number of its samples, and maybe by weights.

    Weights are constant: the result is that of a mean, also where the sum of a penalty is divided by the pixels of an image.
    """
    # Any whole number is a multiple of one sample. So it must be one of all that is added up, or a product of some sizes.
    number = rows if rows > 1 else math.prod(sizes)
    products = [*divisors, math.prod(divisors)] if divisors else []
    for product in products:
        quotient = product / number
        if quotient > 0.5 and math.isclose(quotient, round(quotient), rel_tol=1e-6):
            return True
        if any(math.isclose(product, count, rel_tol=1e-6) for count in _parts(sizes) if count % rows == 0):
            return True
    return False


def _counts_all_ranks(node: Any, sizes: Sequence[int], divisors: Sequence[float], rows: int, width: int) -> bool:
    """Returns whether a sum is divided by the samples of all ranks, and by nothing that is right on this rank."""
    if width == 1 or _is_of_weights(node):
        return False
    right = {rows} | {count for count in _parts(sizes) if count % rows == 0}
    if any(math.isclose(divisor, count, rel_tol=1e-6) for divisor in divisors for count in right):
        return False
    return any(math.isclose(divisor, rows * width, rel_tol=1e-6) for divisor in divisors)


def _parts(sizes: Sequence[int]) -> set[int]:
    """Returns the products of some of the sizes, which a sum over several dimensions may be divided by."""
    return {math.prod(some) for length in range(len(sizes) + 1) for some in combinations(sizes, length)}


def _is_of_weights(node: Any) -> bool:
    """Returns whether what a node adds up was computed, element by element, of parameters alone: a penalty, no loss."""
    waiting = [below for below, _ in node.next_functions]
    for _ in range(_NODES):
        if not waiting:
            return True
        below = waiting.pop()
        if below is None or below.name().endswith("AccumulateGrad"):
            continue
        if not below.name().startswith(_ELEMENTWISE):
            return False
        waiting += [further for further, _ in below.next_functions]
    return False
