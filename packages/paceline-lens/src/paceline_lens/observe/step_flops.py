"""`StepFlops`: how many operations one step computes on this rank, counted once; what a utilisation is computed from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from paceline_lens.observe.flops import COUNTED, Counter
from paceline_lens.observe.phases import PhaseListener

_COUNTED_STEP = 2  # from 1; the first step may build what later ones use


class StepFlops(PhaseListener):
    """Counts the operations of one step of forward and backward passes, without those that are only done again there.

    Counting slows this one step; the others are left alone.

    Args:
        tell: is given the count, at the end of the step.
    """

    def __init__(self, tell: Callable[[int], object]) -> None:
        self._tell = tell
        self._number = 1
        self._phase = "rest"
        self._counter: Counter | None = None
        self._counting = ExitStack()

    def to(self, phase: str) -> None:
        before = self._phase
        self._phase = phase
        if self._counter is None or (before in COUNTED) == (phase in COUNTED):
            return
        if phase in COUNTED:
            self._counting.enter_context(self._counter)
        else:
            self._counting.close()

    def ended(self) -> None:
        if self._counter is not None:
            self.to("rest")
            self._tell(self._counter.forward + self._counter.backward)
            self._counter = None
        self._number += 1
        if self._number == _COUNTED_STEP:
            self._counter = Counter()
