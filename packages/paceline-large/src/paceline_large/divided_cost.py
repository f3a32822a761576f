"""What a rank holds where several ranks divide some elements of a model."""

from __future__ import annotations

from dataclasses import replace

from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts


def with_divided(before: Bytes, elements: int, facts: ModelFacts, parts: int) -> Bytes:
    """Returns the bytes on a rank where some elements of a model, and their gradients and states, are divided.

    Args:
        before: the bytes where they are whole.
        elements: how many are divided.
        facts: the model.
        parts: of which the rank holds one.
    """
    everything = max(1, facts.parameters)

    def left(size: int) -> int:
        return size - size * elements * (parts - 1) // (everything * parts)

    return replace(
        before, parameters=left(before.parameters), gradients=left(before.gradients), optimizer=left(before.optimizer)
    )
