"""How a cost grows with the number of ranks: the exponent p of cost = c * n^p, by least squares over the logarithms."""

from __future__ import annotations

import math
from collections.abc import Mapping


def exponent(cost_by_ranks: Mapping[int, float]) -> float:
    """The slope of log(cost) over log(n). 0 is flat, 1 is linear; a logarithm looks like 0.2 to 0.4 here."""
    points = [(math.log(ranks), math.log(cost)) for ranks, cost in cost_by_ranks.items() if cost > 0]
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def at(ranks: int, cost_by_ranks: Mapping[int, float]) -> float:
    """The cost at another number of ranks, along the fit through the measured ones."""
    power = exponent(cost_by_ranks)
    logarithms = [math.log(cost) - power * math.log(measured) for measured, cost in cost_by_ranks.items() if cost > 0]
    return math.exp(sum(logarithms) / len(logarithms) + power * math.log(ranks))


def shown(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 0.01:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
