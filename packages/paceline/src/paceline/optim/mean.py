"""`Mean`: what the losses of a window are parts of: the mean over samples, over items or over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.base.errors import TrainError

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
        parameters: those whose gradients have a part of this mean.
    """

    kind: str
    source: object
    divisor: float = 1.0
    is_exact: bool = False
    expected: float = 0.0
    counted: float = 0.0
    is_local: bool = False
    micro_batch: int = 0
    parameters: set[Tensor] = field(default_factory=set)

    def take_part(self, parameters: Set[Tensor]) -> None:
        """Records parameters whose gradients have parts of it now."""
        self.parameters |= parameters

    def expect(self, total: float, width: int, *, is_exact: bool) -> None:
        """Sets what the whole window has, and the divisor that follows from it.

        Args:
            total: samples, items or micro-batches.
            width: the number of ranks over which the gradients of parts are averaged; 1 if the divisor is to be as large as
                `total`.
            is_exact: whether it is no estimate.
        """
        self.expected = total
        self.divisor = total / width
        self.is_exact = is_exact

    def count(self, number: float, micro_batch: int, *, once: bool = False) -> bool:
        """Adds what a micro-batch has.

        Args:
            number: samples, items or micro-batches.
            micro_batch: the number of the micro-batch in its window.
            once: whether each micro-batch counts once only.

        Returns:
            Whether it was added.
        """
        if once and self.micro_batch == micro_batch:
            return False
        self.micro_batch = micro_batch
        self.counted += number
        return True

    def forget(self, parameters: Set[Tensor]) -> None:
        """Forgets gradients that were cleared."""
        if not self.parameters:
            return
        self.parameters -= parameters
        # What was counted so far is in no gradient any more.
        if not self.parameters:
            self.counted = 0.0
            self.micro_batch = 0

    def belongs_to(self, source: object) -> bool:
        """Returns whether it is the mean of this source.

        A checkpoint does not say of which loader a mean is: it is that of the loader whose batch comes next.
        """
        if self.kind == SAMPLES and self.source is None:
            self.source = source
        return self.source == source

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
    def of_state(cls, state: Mapping[str, Any], width: int, parameters: Set[Tensor]) -> Mean:
        """Returns the mean of a checkpoint, of which the gradients of these parameters have parts.

        Args:
            state: what `state` has returned.
            width: the number of ranks whose gradients are averaged from now on.
            parameters: with gradients that wait for the rest of the window.
        """
        kept = {name: state[name] for name in ("kind", "source", "is_exact", "expected", "is_local")}
        mean = cls(**kept, counted=state["counted"] or 0.0, parameters=set(parameters))
        mean.expect(mean.expected, width if mean.kind == SAMPLES else 1, is_exact=mean.is_exact)
        return mean


def power_of_two(number: float) -> float:
    """Returns a power of two near a number, by which a loss is divided without rounding."""
    return 2.0 ** round(max(1.0, number)).bit_length()


def checked_count(num_items: object) -> float:
    """Returns the number of items of a loss.

    Raises:
        TrainError: `items-count`, if it is no number that can be counted.
    """
    try:
        count = float(num_items)  # type: ignore[arg-type]  # a tensor of one element, or a number of NumPy
    except (TypeError, ValueError, RuntimeError):
        count = math.nan
    if math.isfinite(count) and count >= 0:
        return count
    raise TrainError(
        "items-count",
        f"num_items = {num_items!r} cannot be a number of items.",
        why="it is the number of items over which the loss is a sum, or the sum of their weights: finite, and 0 or more",
        fix="pass what the loss was summed over, such as `num_items=mask.sum()`",
    )


def mixed(mean: Mean, other: Mean) -> TrainError:
    """Returns the error for gradients that have parts of two means, of which not both can be exact."""
    kinds = " and ".join(sorted({mean.kind, other.kind}))
    return TrainError(
        "items-mixed",
        "one parameter has gradients of two losses in a window whose sizes show only at its end.",
        why=f"means over {kinds}: how many there are is known with the last micro-batch. Then the gradients of each mean are "
        "multiplied by a factor of its own, and those of two means cannot be told apart",
        fix="add the losses of a micro-batch before one `backward(loss, num_items=n)`; or use windows of one micro-batch",
    )
