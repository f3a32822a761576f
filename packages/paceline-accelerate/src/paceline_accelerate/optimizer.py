"""`AcceleratedOptimizer`: the prepared optimizer, which also steps on gradients of a plain `loss.backward()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.base.log import warn_once
from paceline.data.active import ActiveLoaders
from paceline.optim.accumulate import Accumulation
from paceline.optim.optimizer import PreparedOptimizer, Scaler
from paceline.world import tree as trees
from paceline.world.collectives import Collectives
from paceline.world.events import Event
from paceline.world.param_groups import parameters_of
from paceline.world.world import World
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.gradient_state import GradientState
from paceline_accelerate.semantics import ACCELERATE
from paceline_accelerate.state import AcceleratorState


class AcceleratedOptimizer(PreparedOptimizer):
    """An optimizer that steps where the window of the current accelerator ends.

    Args:
        optimizer: the user's.
        device_placement: whether its state is moved to the device; where a model is prepared, it is there already.
        scaler: the loss scaler, or None.

    Attributes:
        steps_by_windows: False for the optimizer of DeepSpeed's engine, which the engine itself steps.
    """

    steps_by_windows = True

    def __init__(self, optimizer: Optimizer, device_placement: bool = True, scaler: Scaler | None = None) -> None:
        accumulation = GradientState().accumulation
        super().__init__(optimizer, accumulation or _alone(), scaler)
        self._is_alone = accumulation is None
        self.device_placement = device_placement
        self._is_accelerate_prepared = True
        self._finish_reduction: Callable[[], None] | None = None

    def join(
        self,
        accumulation: Accumulation,
        scaler: Scaler | None,
        take_step: Callable[[Callable[[], Any]], Any],
        finish_reduction: Callable[[], None] | None = None,
        admits: Callable[[PreparedOptimizer], bool] | None = None,
        stepped: Event[[Optimizer]] | None = None,
    ) -> None:
        """Makes it an optimizer of a run, whose windows it follows from now on.

        Args:
            accumulation, scaler, take_step, admits, stepped: as for `PreparedOptimizer`.
            finish_reduction: averages gradients that no `accelerator.backward` has; None where this process is alone.
        """
        PreparedOptimizer.__init__(self, self.optimizer, accumulation, scaler, take_step, admits, stepped)
        self._is_alone = False
        self._passes_done = accumulation.passes  # earlier backward passes were for other optimizers
        self._finish_reduction = finish_reduction

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes a step where a window ends."""
        self._follow_state()
        return super().step(closure)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients where a window ends."""
        self._follow_state()
        super().zero_grad(set_to_none)

    def _follow_state(self) -> None:
        # Without an accelerator there is no window, and a script may have said in the state whether gradients are whole.
        if self._is_alone:
            self._accumulation.sync = GradientState().sync_gradients

    @property
    def gradient_state(self) -> GradientState:
        """The window of the accelerator that was made last."""
        return GradientState()

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The state of the accelerator that was made last."""
        return AcceleratorState()

    @property
    def scaler(self) -> Any:
        """The loss scaler, or None."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        """Accepts a scaler of the script that is switched off, as imagen-pytorch sets in each step.

        Raises:
            CompatValueError: `compat-argument`, if another scaler would have to replace that of the run.
        """
        is_enabled = getattr(scaler, "is_enabled", None)
        scales = scaler is not None and (is_enabled is None or is_enabled())
        if scaler is self._scaler or (self._scaler is None and not scales):
            return
        own = "no loss scaler" if self._scaler is None else type(self._scaler).__name__
        raise CompatValueError(
            "compat-argument",
            "the loss scaler of a prepared optimizer cannot be replaced.",
            why=f"the run has {own}, and `accelerator.backward` would not use {type(scaler).__name__}",
            fix='remove the assignment, and let `Accelerator(mixed_precision="fp16")` scale the loss',
        )

    def _finish_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Averages gradients of a plain `loss.backward()` over the ranks, and then does what the base class does.

        In a loop without `accelerator.backward` the gradients are those of `loss.backward()`, and are not divided by the
        number of accumulation steps.
        """
        finish_reduction = self._finish_reduction
        # `stale` means that no `accelerator.backward` has run since the last step. With a loss scaler such gradients are
        # refused by `_check_backward`, because they are not scaled.
        is_plain = self.stale and self._scaler is None
        if finish_reduction is not None and is_plain and self._has_gradients():
            warn_once(
                "compat",
                "the loop calls `loss.backward()`: gradients are averaged over the processes, at the latest when the optimizer "
                "steps. `accelerator.backward(loss)` averages while they are computed, and divides by accumulation steps.",
            )
            finish_reduction()
            self._accumulation.began = True
        super()._finish_gradients(parameters)

    def _check_backward(self) -> None:
        """Refuses gradients that were computed without the loss scale; without a scaler accelerate accepts any gradients."""
        if self._scaler is not None:
            super()._check_backward()

    # With the name of this class and the parameter groups, as every optimizer of torch.
    __repr__ = Optimizer.__repr__

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in parameters_of(self))

    def __getstate__(self) -> dict[str, Any]:
        # References to the run are not copied: a copy steps like an optimizer that the script has constructed itself.
        state = {**super().__getstate__(), "_finish_reduction": None, "_scaler": None}
        del state["_accumulation"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        accumulation = GradientState().accumulation
        now = {
            "_accumulation": accumulation or _alone(),
            "_is_alone": accumulation is None,
        }
        super().__setstate__({**state, **now})


def _alone() -> Accumulation:
    """Makes accumulation windows of one micro-batch, for an optimizer that no accelerator has prepared."""
    collectives = Collectives(World(), device=torch.device("cpu"))
    return Accumulation(1, 1, ActiveLoaders(), collectives, semantics=ACCELERATE)


def move_to_device(state: Any, device: Any) -> Any:
    """Returns an optimizer's state with its tensors on a device."""
    return trees.to_device(state, device)


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step function unchanged: this library knows without a mark on it whether a step was taken."""
    return method
