"""`Bytes`: what one rank holds and sends, before a run; each strategy of the chain changes it in turn."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.facts import ModelFacts


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank.

    Attributes:
        parameters: weights that it holds through the whole step.
        gradients: at the end of the backward pass.
        optimizer: states that the optimizer keeps.
        activations: kept between forward and backward.
        buffers: for communication, at the peak.
        sent: in one optimizer step.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    sent: int = 0

    @classmethod
    def alone(cls, facts: ModelFacts, states: int = 2, activations: int = 0) -> Bytes:
        """One process without any strategy, with an optimizer of `states` float32 values a trained parameter (Adam: 2)."""
        trained = facts.parameter_bytes * facts.trainable // max(1, facts.parameters)
        return cls(facts.parameter_bytes, trained, states * 4 * facts.trainable, activations)

    @property
    def held(self) -> int:
        """All that lies in memory at once, at most."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
