"""`AcceleratedScheduler`: steps a scheduler once for each process, as accelerate does.

accelerate does so (unless batches are split) because its users build schedules for the number of batches of one process. The
behaviour is kept, and a warning says so once, with both numbers.
"""

from __future__ import annotations

from typing import Any

from paceline.optim.schedule import PreparedScheduler
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.state import PartialState
from paceline_accelerate.torch_internals.kept import times_stepped


class AcceleratedScheduler(PreparedScheduler):
    """Steps as often for one optimizer step as there are processes.

    Args:
        scheduler: the user's.
        optimizers: prepared optimizers that it schedules, or one.
        step_with_optimizer: False steps at each call, whatever optimizers do.
        split_batches: True steps once for one optimizer step.
        gradient_state: of the accelerator; None takes that of the one that was made last.
    """

    scheduler: Any

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        gradient_state: GradientState | None = None,
    ) -> None:
        several = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.gradient_state = gradient_state or GradientState()
        super().__init__(scheduler, several, self.gradient_state)  # type: ignore[arg-type]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._is_accelerate_prepared = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Takes one scheduler step for each process if an optimizer step was taken."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        was_skipped = any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers)
        if not self.gradient_state.sync_gradients or was_skipped:
            return
        if self.split_batches:
            self.scheduler.step(*args, **kwargs)
            return
        for _ in range(PartialState().num_processes):
            # A schedule of fixed length raises past its end, and a smaller last batch may lead to one step too many.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or times_stepped(self.scheduler) <= total:
                self.scheduler.step(*args, **kwargs)

    def get_lr(self) -> Any:
        """Returns the learning rates that the scheduler computes."""
        return self.scheduler.get_lr()

    def get_last_lr(self) -> Any:
        """Returns the learning rates of the last step."""
        return self.scheduler.get_last_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Prints learning rates, with schedulers that can."""
        return self.scheduler.print_lr(*args, **kwargs)
