"""Where the stages of a `PipelineModule` begin: DeepSpeed's ways of counting layers, and its way of balancing.

    uniform       layers count the same; earlier stages take the rest
    parameters    a layer counts its elements that train      -> balanced
    type:REGEX    a layer counts 1 where its class's name matches -> balanced
    profile       a layer counts the time it takes            -> the slowest stage as fast as can be

DeepSpeed's balance is the least difference between the heaviest and the lightest stage, which is not the least
heaviest stage; scripts get DeepSpeed's, and a note where the other would be lighter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from paceline.base.errors import CompatError, PlanError
from paceline_large.pipeline.split import balanced as least_heaviest

METHODS = ("uniform", "parameters", "type:REGEX", "profile")


def uniform(count: int, stages: int) -> list[int]:
    """Lists the numbers of the layers with which stages begin, and the count last."""
    if count <= stages:
        return [min(stage, count) for stage in range(stages + 1)]
    # The first stages have one layer more each, until none is left over.
    size, num_with_one_more = divmod(count, stages)
    return [stage * size + min(stage, num_with_one_more) for stage in range(stages + 1)]


def balanced(weights: Sequence[float], stages: int) -> list[int]:
    """Divides layers so that the heaviest and the lightest stage differ least; of equal divisions the later begin counts.

    As in DeepSpeed, one best division of the first `n` layers into `s` stages is remembered, and those into `s + 1` stages
    extend it. The result is therefore not always the best of all, but it is DeepSpeed's.
    """
    count = len(weights)
    if count <= stages:
        return uniform(count, stages)
    weight_before = [0.0, *accumulate(weights)]  # of the layers before each one
    # The best ways with one stage less, by how many layers they hold: at first no stage holds no layer.
    ways = [_Way(0.0, 0.0, inf, 0)] + [_NO_WAY] * count
    ways_by_stage: list[list[_Way]] = []
    for _ in range(stages):
        longer_ways = [_NO_WAY] * (count + 1)
        for end in range(count + 1):
            for begin in range(end):
                # The last stage holds layers `begin` to `end`; the stages before it are the best way for the first `begin`.
                weight = weight_before[end] - weight_before[begin]
                most = max(ways[begin].heaviest, weight)
                least = min(ways[begin].lightest, weight)
                if most - least <= longer_ways[end].difference:
                    longer_ways[end] = _Way(most - least, most, least, begin)
        ways = longer_ways
        ways_by_stage.append(ways)
    # From the last stage to the first: each begins where the one before it ends.
    parts = [count]
    for ways in reversed(ways_by_stage):
        parts.append(ways[parts[-1]].begin)
    return parts[::-1]


class _Way(NamedTuple):
    """A division of the first layers into stages.

    Attributes:
        difference: of the heaviest and the lightest stage.
        heaviest, lightest: weights of these.
        begin: number of the layer with which the last stage begins.
    """

    difference: float
    heaviest: float
    lightest: float
    begin: int


_NO_WAY = _Way(inf, inf, inf, 0)


def heaviest(weights: Sequence[float], parts: Sequence[int]) -> float:
    """Returns the weight of the heaviest stage."""
    stage_weights = [sum(weights[begin:end]) for begin, end in pairwise(parts)]
    return max(stage_weights)


def matches(method: str, classes: Sequence[str]) -> list[int]:
    """Weighs layers for `type:REGEX`: 1 where the class's name has the expression in it, in any case, else 0.

    Raises:
        PlanError: `pipe-no-layer`, where it is found in none; `pipe-method`, where it is no regular expression.
    """
    expression = method.partition(":")[2]
    try:
        pattern = re.compile(expression, re.IGNORECASE)
    except re.error as error:
        raise unknown(method, f"{expression!r} is no regular expression: {error}") from None
    weights = [int(pattern.search(name) is not None) for name in classes]
    if not any(weights):
        raise PlanError(
            "pipe-no-layer",
            f"Partitioning '{expression}' found no valid layers to partition.",
            why=f"partition_method={method!r}; classes of the layers: {', '.join(dict.fromkeys(classes))}",
            fix="write a part of such a name, as in partition_method='type:linear'; or use 'uniform'",
        )
    return weights


def unknown(method: str, why: str = "") -> CompatError:
    """Returns the error of a method that does not exist; a NotImplementedError, as DeepSpeed's is."""
    return CompatError(
        "pipe-method",
        f"Partitioning method {method} not implemented.",
        why=why or f"partition_method={method!r}; there are {', '.join(METHODS)}",
        fix="use partition_method='parameters', or another of these",
    )


def lighter(weights: Sequence[float], parts: Sequence[int]) -> str:
    """Returns a hint where another division has a lighter heaviest stage; empty where none does."""
    num_stages = len(parts) - 1
    other_parts = [*least_heaviest(weights, num_stages), len(weights)]
    now = heaviest(weights, parts)
    best = heaviest(weights, other_parts)
    if best >= now:
        return ""
    begins = ", ".join(map(str, other_parts[1:-1]))
    return (
        f"stages that begin with layers {begins} would hold at most {best:g} instead of {now:g}, "
        "and the heaviest stage sets the pace: give `partition_method=[...]` these numbers to have it so"
    )
