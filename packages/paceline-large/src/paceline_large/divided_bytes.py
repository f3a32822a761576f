"""The memory of a plan whose strategies divide some of a model's parameters."""

from __future__ import annotations

from dataclasses import replace

from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts


def with_divided(whole: Bytes, elements: int, facts: ModelFacts, parts: int) -> Bytes:
    """Returns the bytes of one process where some elements of a model, and their gradients and states, are divided.

    Args:
        whole: the bytes before.
        elements: how many are divided.
        facts: the model.
        parts: of which the rank holds one.
    """
    everything = max(1, facts.parameters)

    def left(size: int) -> int:
        return size - size * elements * (parts - 1) // (everything * parts)

    return replace(
        whole, parameters=left(whole.parameters), gradients=left(whole.gradients), optimizer=left(whole.optimizer)
    )
