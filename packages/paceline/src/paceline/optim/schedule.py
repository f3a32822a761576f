"""The prepared scheduler: a scheduler step is an optimizer step, at every width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from paceline.base.log import warn_once
from paceline.optim.accumulate import Accumulation
from paceline.optim.optimizer import PreparedOptimizer
from paceline.world.param_groups import inner_optimizers, parameters_of

_LENGTHS = ("total_steps", "T_max", "total_iters", "T_0")


class Scheduler(Protocol):
    """The methods of a learning-rate scheduler, torch's or another."""

    def step(self, *args: object, **kwargs: object) -> object: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> None: ...


class PreparedScheduler:
    """Steps the user's scheduler once for each optimizer step that was taken.

    `step()` does nothing inside of a window, and after an optimizer step that was skipped.

    Args:
        scheduler: the user's scheduler.
        optimizers: the prepared optimizers that it schedules.
        accumulation: knows whether the window ends.
    """

    def __init__(
        self, scheduler: Scheduler, optimizers: Sequence[PreparedOptimizer], accumulation: Accumulation
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._accumulation = accumulation

    def step(self, *args: object, **kwargs: object) -> None:
        """Takes one scheduler step, if an optimizer step was taken."""
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        parameters: list[Tensor] = []
        for optimizer in self.optimizers:
            parameters += parameters_of(optimizer)
        if self._accumulation.ends(parameters):
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)


def is_scheduler(value: object) -> bool:
    """Returns whether a value has the methods of a learning-rate scheduler, and an optimizer."""
    # An optimizer has all of these methods, too, and may wrap another one as `optimizer`; but it has parameter groups.
    has_all = all(hasattr(value, name) for name in ("step", "state_dict", "load_state_dict", "optimizer"))
    return has_all and not hasattr(value, "param_groups")


def compare_lengths(scheduler: Scheduler, epochs: Sequence[tuple[int, int]], steps: int, width: int) -> None:
    """Warns once if the length of a schedule was computed from the batches of one process, but the run takes fewer steps.

    Args:
        scheduler: the user's.
        epochs: the number of batches in each loader's epoch, before and after `prepare`.
        steps: the number of micro-batches in an optimizer step.
        width: the number of ranks that read different samples.
    """
    lengths = [getattr(scheduler, name, None) for name in _LENGTHS]
    whole_lengths = [length for length in lengths if isinstance(length, int)]
    if not whole_lengths:
        return
    length = whole_lengths[0]
    for batches_before, batches in epochs:
        steps_per_epoch = -(-batches // steps)
        # A length that is a multiple of the batches of an epoch was probably computed as epochs x len(loader).
        if batches_before and length % batches_before == 0 and steps_per_epoch != batches_before:
            count = length // batches_before
            taken = count * steps_per_epoch
            warn_once(
                "optim",
                f"{type(scheduler).__name__} is {length} steps long ({count} x {batches_before} batches), but {count} "
                f"epoch{'s' if count > 1 else ''} will take {taken} optimizer steps "
                f"({width} processes, {steps} micro-batches a step). A scheduler step is an optimizer step: build the schedule "
                f"for {taken} steps, with `len(prepared_loader)`.",
            )
            return


def warn_of_other_optimizer(scheduler: Scheduler, prepared: Sequence[Optimizer]) -> None:
    """Warns once if a scheduler sets the learning rates of an optimizer that shares no parameter group with a prepared one.

    Args:
        scheduler: the user's.
        prepared: the optimizers that were prepared so far. Without any, it is not known yet whether its own will be.
    """
    own_groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if not prepared or not own_groups:
        return
    scheduled = set(map(id, own_groups))
    # Optimizers such as Lookahead step through another one, and the scheduler may be built for either.
    for optimizer in prepared:
        for each in (optimizer, *inner_optimizers(optimizer)):
            if not scheduled.isdisjoint(map(id, each.param_groups)):
                return
    kind = type(scheduler).__name__
    warn_once(
        "optim",
        f"{kind} changes the learning rate of an optimizer that was not prepared, so the prepared ones keep theirs. "
        f"Construct {kind} with the optimizer that is prepared, or prepare its optimizer before it.",
    )
