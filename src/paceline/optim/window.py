"""`Window`: the micro-batches of one optimizer step of a set of models, and the `Mean`s of which their losses are parts.

    enter      begins a micro-batch, and a new window after the last one of the window before
    parts      each backward pass adds a part of one mean: over a loader's samples, over items, or over micro-batches
    leave      ends the micro-batch; one without a backward pass, which the script has left out, does not count

Nothing here communicates, and nothing here changes a gradient: `Accumulation` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLES = "samples"  # of a loader
ITEMS = "items"  # that the script counts
MICRO_BATCHES = "micro-batches"  # of a loop over no prepared loader


@dataclass(eq=False)
class Mean:
    """A mean of which the losses of several backward passes of one window are parts.

    Attributes:
        kind: `SAMPLES`, `ITEMS` or `MICRO_BATCHES`.
        source: which one of this kind: the loader of the samples, or the number of the loss in its micro-batch.
        divisor: what losses are divided by, such that the sum of their gradients, averaged over the ranks, is the mean's.
        is_exact: whether `divisor` follows from what the whole window has. Otherwise it is an estimate, which the last
            backward pass of the window replaces, and gradients so far are multiplied by what it was wrong by.
        expected: of what the whole window has, the number that `divisor` was computed from.
        counted: what backward passes of the window had so far; of this rank if `is_local`, else of all ranks.
        is_local: whether only this rank knows what it has.
        micro_batch: the number of the micro-batch that was counted last.
        parameters: the `id` of each parameter whose gradient has a part of this mean.
    """

    kind: str
    source: object
    divisor: float = 1.0
    is_exact: bool = False
    expected: float = 0.0
    counted: float = 0.0
    is_local: bool = False
    micro_batch: int = 0
    parameters: set[int] = field(default_factory=set)

    def state(self) -> dict[str, Any]:
        """Returns its state for a checkpoint. The same on all ranks, except for `counted` if that `is_local`."""
        return {
            "kind": self.kind,
            "source": self.source if self.kind == ITEMS else None,
            "is_exact": self.is_exact,
            "expected": self.expected,
            "counted": None if self.is_local else self.counted,
            "is_local": self.is_local,
            "micro_batch": self.micro_batch,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], width: int, parameters: set[int]) -> Mean:
        """Returns the mean of a checkpoint, of which the gradients of these parameters have parts.

        Args:
            state: what `state` has returned.
            width: the number of ranks whose gradients are averaged from now on.
            parameters: the `id` of each parameter.
        """
        kept = {name: state[name] for name in ("kind", "source", "is_exact", "expected", "is_local")}
        mean = cls(**kept, counted=state["counted"] or 0.0, parameters=set(parameters))
        mean.divisor = mean.expected / width if mean.kind == SAMPLES else mean.expected
        return mean


class Window:
    """The micro-batches of one optimizer step of some models.

    Args:
        steps: the number of micro-batches.

    Attributes:
        steps: the number of micro-batches.
        sync: whether the current micro-batch, or the last one, ends the window, so that optimizers step.
        is_open: whether the script is inside of a micro-batch.
        micro_batch: the number of the current micro-batch, from 1; that of the last one outside.
        means: the means of which losses of this window are parts.
        members: the `id` of each parameter that took part in a backward pass of this window.
        ready: the `id` of each parameter that took part in one of the last micro-batch.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.sync = True
        self.is_open = False
        self.micro_batch = 0
        self._num_items_losses = 0  # in this micro-batch
        self._passed = False  # whether the current micro-batch had a backward pass
        self._begin()

    def _begin(self) -> None:
        self.means: list[Mean] = []
        self.members: set[int] = set()
        self.ready: set[int] = set()
        self._done = 0

    @property
    def done(self) -> int:
        """The number of micro-batches of this window that had their backward pass."""
        return self.micro_batch if self._passed else self._done

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of this window wait for further micro-batches."""
        return not self.sync and self.done > 0

    def enter(self, steps: int, is_last: bool) -> None:
        """Begins a micro-batch.

        Args:
            steps: the number of micro-batches from now on.
            is_last: whether the window ends with this micro-batch in any case, as at the end of a loader.
        """
        if self._done == 0:
            self._begin()
        self.steps = steps
        self.micro_batch = self._done + 1
        self.sync = is_last or self.micro_batch >= steps
        self.is_open = True
        self._num_items_losses = 0
        self._passed = False

    def enter_alone(self) -> None:
        """Begins a window of one backward pass, which no `accumulate` surrounds."""
        self._begin()
        self.steps = 1
        self.micro_batch = 1
        self.sync = True
        self._num_items_losses = 0

    def enter_after(self, done: int, steps: int, is_last: bool) -> None:
        """Begins a micro-batch after `done` others, for a caller that counts them itself; 0 begins a new window."""
        self._done = done
        self.enter(steps, is_last)
        self._passed = True

    def leave(self) -> None:
        """Ends a micro-batch."""
        self.is_open = False
        if not self._passed:
            return
        self._passed = False
        self._done = self.micro_batch
        if self.sync:
            self._done = 0

    def passed(self, parameters: set[int], mean: Mean | None) -> None:
        """Records that a backward pass has given parts of a mean to the gradients of these parameters."""
        self._passed = True
        self.members |= parameters
        if self.sync:
            self.ready |= parameters
        if mean is not None:
            mean.parameters |= parameters

    def mean(self, kind: str, source: object) -> Mean | None:
        """Returns the mean of a kind and a source, if a loss of this window was a part of it."""
        for mean in self.means:
            if mean.kind == kind and mean.source == source:
                return mean
        for mean in self.means:
            # A checkpoint does not say of which loader a mean is: of the one whose batch comes next.
            if mean.kind == kind == SAMPLES and mean.source is None:
                mean.source = source
                return mean
        return None

    def next_items_loss(self) -> int:
        """Returns the number of a loss with items in its micro-batch, from 0: the losses of one number are one mean."""
        number = self._num_items_losses
        self._num_items_losses += 1
        return number

    def keeps(self, parameters: set[int]) -> bool:
        """Returns whether gradients of these parameters wait for a later backward pass of this window.

        In the last micro-batch they do so until one of them has taken part in it.
        """
        # `_done` counts micro-batches that have ended: without one, gradients are older than the window, unless the first
        # micro-batch has had its pass and others follow.
        if self._done == 0:
            return self.holds_gradients and not self.members.isdisjoint(parameters)
        return self.ready.isdisjoint(parameters) and not self.members.isdisjoint(parameters)

    def forget(self, parameters: set[int]) -> None:
        """Forgets that the gradients of these parameters have parts of means: they were cleared."""
        for mean in self.means:
            if not mean.parameters:
                continue
            mean.parameters -= parameters
            # What was counted so far is in no gradient any more.
            if not mean.parameters:
                mean.counted = 0.0
                mean.micro_batch = 0

    # -- in a checkpoint -----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the state of the window, without its means."""
        return {"sync": self.sync, "micro": self.done, "steps": self.steps}

    def load(self, done: int) -> None:
        """Continues a window after `done` micro-batches."""
        self._begin()
        self.sync = False
        self._done = self.micro_batch = done
