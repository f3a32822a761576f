"""Notices a loss that is no mean over the samples of its micro-batch, where it can be seen.

`cross_entropy` leaves out targets with `ignore_index`, and weighs targets by the `weight` of their class. It divides by what
is left, which each micro-batch of each rank has another number of. A sum over samples that nothing divides would be averaged
over ranks, as each loss is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.base.log import warn_once
from paceline.torch_internals.tensors import rows_of_sum, targets_of_mean

_PASSES = 3  # the first backward passes of a run are looked at: on an accelerator, to look waits for the device
_NODES = 32  # of the graph behind a loss; losses are a few sums and factors away from their mean
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Sum", "Mean", "Stack", "Unsqueeze", "Squeeze", "View")
_DIVIDING = ("Div", "Mean")
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


def look(loss: Tensor, passes: int, rows: int) -> None:
    """Warns once if such a mean or sum is a part of a loss.

    Args:
        loss: its backward pass has not run yet.
        passes: number of backward passes of the run.
        rows: number of samples that this rank has in the micro-batch.
    """
    if passes > _PASSES:
        return
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]  # a node, and whether something divides its result
    for _ in range(_NODES):
        if not waiting:
            return
        node, is_divided = waiting.pop()
        if node is None:
            continue
        targets = targets_of_mean(node)
        if targets is not None and targets[0] != targets[1]:
            warn_once("train", _TEXT)
            return
        if not is_divided and rows_of_sum(node) in (0, rows) and not _is_of_weights(node):
            warn_once("train", _SUM_TEXT)
            return
        if node.name().startswith(_ARITHMETIC):
            is_divided = is_divided or node.name().startswith(_DIVIDING)
            waiting += [(below, is_divided) for below, _ in node.next_functions]


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
