"""How a loss was made, read from its graph: `grad_fn` saves the divisor of a division and the kind of a reduction."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from paceline.torch_internals.reductions import divisor_of, reduction_of


def divisors(loss: Tensor) -> tuple[list[float], bool]:
    """Returns the numbers by which a loss was divided last, and whether a mean stands below these divisions.

    A product with a number counts as a division by its inverse. A division by a tensor with more than one element ends the
    search, and so does one by a tensor that is trained.

    Args:
        loss: the tensor whose `backward` is called.
    """
    found: list[float] = []
    node: Any = loss.grad_fn
    while node is not None:
        followed = [below for below, _ in node.next_functions if below is not None]
        if len(followed) != 1:
            break
        divisor = divisor_of(node, operand=0)
        if divisor is None or float(divisor) in (0.0, math.inf):
            break
        found.append(float(divisor))
        node = followed[0]
    reduction = None if node is None else reduction_of(node)
    return found, reduction is not None and reduction.is_mean
