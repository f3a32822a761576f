"""How a loss was made, read from its graph: `grad_fn` saves the divisor of a division and the kind of a reduction."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_MEAN = 1  # the number of "mean" among the reductions that a loss function saves


def divisors(loss: Tensor) -> tuple[list[float], bool]:
    """Returns the numbers by which a loss was divided last, and whether a mean stands below these divisions.

    A product with a number counts as a division by its inverse. A division by a tensor with more than one element ends the
    search, and so does one by a tensor that is trained.

    Args:
        loss: the tensor whose `backward` is called.
    """
    found: list[float] = []
    node: Any = loss.grad_fn
    while node is not None and type(node).__name__ in ("DivBackward0", "MulBackward0"):
        other = node._saved_other
        followed = [pair[0] for pair in node.next_functions if pair[0] is not None]
        if other is None or other.numel() != 1 or len(followed) != 1:
            return found, False
        value = float(other.detach().reshape(-1).tolist()[0])
        if value == 0:
            return found, False
        found.append(value if type(node).__name__ == "DivBackward0" else 1 / value)
        node = followed[0]
    name = type(node).__name__
    return found, name == "MeanBackward0" or getattr(node, "_saved_reduction", None) == _MEAN
