"""`StepFlops`: how many operations one step computes on this rank, counted once; what a utilisation is computed from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from paceline.observe.flops import COUNTED, Counter
from paceline.observe.phases import Listener


class StepFlops(Listener):
    """Counts the operations of one step of forward and backward passes, without those that are only done again there.

    Counting slows this one step; the others are left alone.

    Args:
        tell: is given the count, at the end of the step.
        step: number of the step that is counted, from 1. The first one may build what later ones use.
    """

    def __init__(self, tell: Callable[[int], object], step: int = 2) -> None:
        self._tell = tell
        self._step = step
        self._number = 1
        self._phase = "rest"
        self._counter = Counter() if step == 1 else None
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
        if self._number == self._step:
            self._counter = Counter()
