"""The prepared scheduler: a scheduler step is an optimizer step, at every width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.base.log import warn_once
from paceline.optim.accumulate import Accumulation

_LENGTHS = ("total_steps", "T_max", "total_iters", "T_0")


class PreparedScheduler:
    """Steps the user's scheduler once for each optimizer step that was taken.

    `step()` does nothing inside a window and after a step that an overflow skipped.

    Args:
        scheduler: the user's; torch's or anything with `step`.
        optimizers: prepared optimizers that it schedules.
        accumulation: knows whether the window ends.
    """

    def __init__(self, scheduler: Any, optimizers: Sequence[Any], accumulation: Accumulation) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._accumulation = accumulation

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One scheduler step, where an optimizer step was taken."""
        if self._accumulation.sync and not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)


def is_scheduler(value: Any) -> bool:
    """Whether a value behaves as a learning-rate scheduler: it steps, it saves, and it knows an optimizer."""
    return all(hasattr(value, name) for name in ("step", "state_dict", "load_state_dict", "optimizer")) and not hasattr(
        value, "param_groups"
    )


def compare_lengths(scheduler: Any, before: Sequence[int], after: Sequence[int], steps: int, width: int) -> None:
    """Says once where a schedule was counted in one process's batches, but the run takes fewer steps.

    Args:
        scheduler: the user's.
        before, after: batches in each loader's epoch before and after `prepare`.
        steps: micro-batches in an optimizer step.
        width: ranks that read different samples.
    """
    length = next(
        (getattr(scheduler, name) for name in _LENGTHS if isinstance(getattr(scheduler, name, None), int)), None
    )
    if length is None:
        return
    for old, new in zip(before, after, strict=True):
        taken = -(-new // steps)
        if old and length % old == 0 and taken != old:
            epochs = length // old
            warn_once(
                "optim",
                f"{type(scheduler).__name__} is {length} steps long ({epochs} x {old} batches), but {epochs} "
                f"epoch{'s' if epochs > 1 else ''} will take {epochs * taken} optimizer steps "
                f"({width} processes, {steps} micro-batches a step). A scheduler step is an optimizer step: build the schedule "
                f"for {epochs * taken} steps, with `len(prepared_loader)`.",
            )
            return
