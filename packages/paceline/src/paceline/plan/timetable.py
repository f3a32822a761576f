"""`Timetable`: the order in which ranks work on a batch where they do not all work on all of it at the same time."""

from __future__ import annotations

from typing import Protocol


class Timetable(Protocol):
    """What a strategy knows of that order, for forecasts and drawings."""

    def text(self) -> str:
        """Returns a drawing, one row a rank."""
        ...

    def seconds(self, forward_s: float, backward_s: float, batches: int, alone: float) -> float:
        """Returns the seconds of one step, from its first forward pass to its last backward pass.

        Args:
            forward_s, backward_s: seconds that rank 0 computes in the step while all ranks compute.
            batches: how many batches the step has.
            alone: how many times as fast a rank computes while the others wait.
        """
        ...
