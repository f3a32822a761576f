"""Notices a loss that is a mean over something else than the samples of its micro-batch, where it can be seen.

`cross_entropy` leaves out targets with `ignore_index`, and weighs targets by the `weight` of their class. It divides by what
is left, which each micro-batch of each rank has another number of.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.base.log import warn_once
from paceline.torch_internals.tensors import targets_of_mean

_PASSES = 3  # the first backward passes of a run are looked at: on an accelerator, to look waits for the device
_NODES = 32  # of the graph behind a loss; losses are a few sums and factors away from their mean
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Sum", "Mean", "Stack", "Unsqueeze", "Squeeze", "View")
_TEXT = (
    "a loss is the mean of `cross_entropy` over only some targets, or over their weights (`ignore_index`, `weight`). Each "
    "process and micro-batch divides by its own number, so the result depends on how the samples are divided. With n for "
    "that number, such as `(labels != -100).sum()` or `weight[labels].sum()`, this is exact: "
    "`accelerator.backward(loss * n, num_items=n)`"
)


def look(loss: Tensor, passes: int) -> None:
    """Warns once if such a mean is a part of a loss."""
    if passes > _PASSES:
        return
    waiting: list[Any] = [loss.grad_fn]
    for _ in range(_NODES):
        if not waiting:
            return
        node = waiting.pop()
        if node is None:
            continue
        targets = targets_of_mean(node)
        if targets is not None and targets[0] != targets[1]:
            warn_once("train", _TEXT)
            return
        if node.name().startswith(_ARITHMETIC):
            waiting += [below for below, _ in node.next_functions]
