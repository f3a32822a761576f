"""`Keep`: the rule by which automatically named checkpoints are kept. `retention.py` follows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.base.errors import CheckpointError
from paceline.config.keywords import checked_keywords

if TYPE_CHECKING:
    from paceline.checkpoint.format.manifest import Manifest


@checked_keywords
@dataclass(frozen=True)
class Keep:
    """Which automatically named checkpoints are kept: those of any rule, and the last one. Without a rule all are kept.

    Attributes:
        last: keeps this number of the newest checkpoints.
        every: keeps checkpoints whose step is a multiple of this number.
        best: the name of a metric of `save_state(metrics=...)`: keeps the checkpoint with the best value, of several the
            newest. A checkpoint whose value is NaN is never the best.
        mode: whether the best value is the "min" or the "max".

    Raises:
        CheckpointError: `checkpoint-keep`.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        for name, number in (("last", self.last), ("every", self.every)):
            if number is not None:
                _check_count(f"Keep({name}=...)", number)
        if self.mode not in ("min", "max"):
            raise CheckpointError(
                "checkpoint-keep",
                f"the best value of {self.best!r} is neither the smallest nor the largest: mode={self.mode!r}.",
                fix='write mode="min" or mode="max"',
            )

    @classmethod
    def of(cls, total_limit: int | None, keep: Keep | None) -> Keep:
        """Returns the rule for the arguments of `Accelerator`, of which only one may be given."""
        if total_limit is not None:
            _check_count("total_limit", total_limit)
        if keep is None:
            return cls(last=total_limit)
        if not isinstance(keep, Keep):
            raise CheckpointError(
                "checkpoint-keep",
                f"{keep!r} is no rule for keeping checkpoints.",
                why="Accelerator(keep=...) takes a `Keep`; a number of checkpoints is total_limit",
                fix=f"write total_limit={keep}" if type(keep) is int else "write keep=Keep(last=3)",
            )
        if total_limit is not None:
            raise CheckpointError(
                "checkpoint-keep",
                "two arguments say how many checkpoints are kept.",
                why=f"total_limit={total_limit} and keep={keep}",
                fix=f"write only keep=Keep(last={total_limit}, ...)",
            )
        return keep

    def check(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        """Returns the metrics of a save as numbers.

        Raises:
            CheckpointError: `checkpoint-metric`, if one is no number, or the metric of `best` is missing.
        """
        given_metrics = metrics or {}
        try:
            numbers = {str(name): float(value) for name, value in given_metrics.items()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                "checkpoint-metric",
                "a metric is no number.",
                why=str(error),
                fix="give numbers, or tensors of one element: `metrics={'loss': loss.item()}`",
            ) from None
        if self.best is not None and self.best not in numbers:
            given = ", ".join(numbers) or "none"
            raise CheckpointError(
                "checkpoint-metric",
                f"the best checkpoint is kept by {self.best!r}, which this save does not give.",
                why=f"keep=Keep(best={self.best!r}); metrics given: {given}",
                fix=f"save with `metrics={{{self.best!r}: value}}`; use NaN for a value that is not known",
            )
        return numbers

    @property
    def unknown(self) -> dict[str, float]:
        """Metrics for a save before the metric of `best` was measured: NaN."""
        return {} if self.best is None else {self.best: math.nan}

    def stays(self, checkpoints: Sequence[tuple[str, Manifest]]) -> set[str]:
        """Returns the paths of the checkpoints, given oldest first, that a rule keeps."""
        if self.last is None and self.every is None and self.best is None:
            return {path for path, _ in checkpoints}
        stay: set[str] = set()
        if self.last:
            stay |= {path for path, _ in checkpoints[-self.last :]}
        if self.every:
            stay |= {path for path, manifest in checkpoints if manifest.step % self.every == 0}
        # With the sign turned for "min", the best value is always the largest.
        sign = 1 if self.mode == "max" else -1
        best_path: str | None = None
        best_value = -math.inf
        for path, manifest in checkpoints:
            value = sign * manifest.metrics.get(self.best or "", math.nan)
            if value >= best_value:  # NaN compares as false; of equal values the newest counts
                best_path = path
                best_value = value
        if best_path is not None:
            stay.add(best_path)
        return stay


def _check_count(argument: str, value: object) -> None:
    """Refuses a value that is not a number of checkpoints or steps.

    Raises:
        CheckpointError: `checkpoint-keep`.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    raise CheckpointError(
        "checkpoint-keep",
        f"{argument} cannot be {value!r}.",
        why="it is a whole number of at least 1: the checkpoint just saved is always kept",
        fix="write a number such as 3, or None, which keeps all of them",
    )
