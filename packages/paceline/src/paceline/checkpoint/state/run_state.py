"""`RunState`: the counters of a run. `Stateful`: what else a checkpoint can hold. A run that saves nothing has both, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Stateful(Protocol):
    """An object whose state a checkpoint can hold."""

    def state_dict(self) -> Any:
        """Returns tensors, numbers, text, and containers of these."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restores what `state_dict` returned."""


@dataclass
class RunState:
    """Counters of a run, over all epochs and restarts.

    Attributes:
        step: the number of optimizer steps.
        micro_step: the number of finished micro-batches in an open accumulation window; 0 between windows.
        extra: other JSON values of the run.
    """

    step: int = 0
    micro_step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters."""
        return {"step": self.step, "micro_step": self.micro_step, "extra": dict(self.extra)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.step = state["step"]
        self.micro_step = state["micro_step"]
        self.extra = dict(state["extra"])
