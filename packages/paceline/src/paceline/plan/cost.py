"""`Bytes` is a forecast of what one rank holds and sends; each strategy of the chain changes it in turn."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.facts import ModelFacts


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank.

    Attributes:
        parameters: the weights that the rank holds during the whole step.
        gradients: the gradients at the end of the backward pass.
        optimizer: the states that the optimizer keeps.
        activations: the tensors that are kept between forward and backward.
        buffers: the buffers for communication, at the peak.
        sent: the bytes that the rank sends in one optimizer step.
        host: the bytes that wait in the host's memory, which is another than the device's.
        host_traffic: the bytes that are copied between both in one optimizer step.
        disk: the bytes in the rank's files.
        disk_traffic: the bytes that are read from them and written to them in one optimizer step.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    sent: int = 0
    host: int = 0
    host_traffic: int = 0
    disk: int = 0
    disk_traffic: int = 0

    @classmethod
    def alone(cls, facts: ModelFacts, states: float = 2.0, activations: int = 0) -> Bytes:
        """Returns the bytes of one process without any strategy.

        Args:
            facts: the model.
            states: float32 values that the optimizer keeps for each trained parameter; Adam keeps 2.
            activations: bytes that are kept between forward and backward.
        """
        return cls(facts.parameter_bytes, facts.trainable_bytes, int(states * 4 * facts.trainable), activations)

    @property
    def parts(self) -> dict[str, int]:
        """What is in the device's memory, by kind."""
        kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
        return {kind: getattr(self, kind) for kind in kinds}

    @property
    def held(self) -> int:
        """The peak of memory, if all of these exist at the same time."""
        return sum(self.parts.values())
