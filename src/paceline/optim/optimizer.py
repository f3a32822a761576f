"""The prepared optimizer: steps only where a window ends, corrected, unscaled, and never on gradients that overflowed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from paceline.base.errors import TrainError
from paceline.optim.accumulate import Accumulation
from paceline.world import runtime
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import local


class Scaler(Protocol):
    """What is used of a loss scaler (`precision.scaler.LossScaler`)."""

    @property
    def loss_scale(self) -> float: ...
    def unscale(self, optimizer: Optimizer) -> None: ...
    def step(self, optimizer: Optimizer) -> bool: ...
    def forget(self, optimizer: Optimizer) -> None: ...


def _of_wrapped(name: str) -> property:
    """An attribute that the wrapped optimizer owns."""

    def get(self: PreparedOptimizer) -> Any:
        return getattr(self.optimizer, name)

    def replace(self: PreparedOptimizer, value: object) -> None:
        setattr(self.optimizer, name, value)

    return property(get, replace)


class PreparedOptimizer(Optimizer):
    """Wraps an optimizer; the loop calls `step` and `zero_grad` after each micro-batch as it always did.

    It is an `Optimizer` for learning-rate schedulers and for `isinstance`, and shares the wrapped one's
    `param_groups` and `state` rather than holding any.

    Args:
        optimizer: the user's, bound to the prepared parameters.
        accumulation: knows whether a window ends and what its gradients are corrected by.
        scaler: the loss scaler, or None.
        guard: what each step runs inside of.
        admits: looks at the gradients of a window, which are final, and says whether they are stepped; None: always.

    Attributes:
        optimizer: the wrapped one.
        step_was_skipped: whether the last `step` left the weights alone because of an overflow or an anomaly.
        steps: optimizer steps so far, skipped ones included.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        scaler: Scaler | None = None,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
        admits: Callable[[PreparedOptimizer], bool] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.step_was_skipped = False
        self.steps = 0
        self._accumulation = accumulation
        self._scaler = scaler
        self._guard = guard
        self._admits = admits
        self._runtime = runtime.current()
        # An optimizer of a script's own may have a `zero_grad` without arguments.
        self._takes_set_to_none = "set_to_none" in signature(optimizer.zero_grad).parameters
        self._corrected = False
        self._passes_done = 0  # backward passes whose gradients were stepped or cleared

    # Schedulers and users read and replace these here.
    param_groups = _of_wrapped("param_groups")
    state = _of_wrapped("state")
    defaults = _of_wrapped("defaults")

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.__dict__["optimizer"], name)

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by: 1.0 but under fp16."""
        return 1.0 if self._scaler is None else self._scaler.loss_scale

    cur_scale = loss_scale  # the name that loss scalers of other libraries have for it

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step where the window ends; nothing in between.

        Args:
            closure: computes the loss anew, gradients included, and returns it, as LBFGS needs; each rank then sees the
                mean over all ranks, so that all search alike.

        Raises:
            TrainError: `fp16-loss` under fp16, where the loss itself is not finite; `optimizer-closure`; `backward-missing`.
        """
        if closure is not None:
            return self._search(closure)
        if not self._accumulation.sync:
            return None
        self.correct_gradients()
        self.steps += 1
        result = None
        if self._admits is not None and not self._admits(self):
            self.leave_out()
            self._runtime.stepped(self, self._accumulation)
            return None
        self._corrected = False
        self._passes_done = self._accumulation.passes
        with self._guard():
            if self._scaler is None:
                self.step_was_skipped = False
                result = self.optimizer.step()
            else:
                self.step_was_skipped = self._scaler.step(self.optimizer)
        self._runtime.stepped(self, self._accumulation)
        return result

    def _search(self, closure: Callable[[], float]) -> float:
        """A step that calls its closure as often as it wants, as the line search of LBFGS does."""
        why = []
        if self._scaler is not None:
            why.append("mixed_precision='fp16': whether a gradient overflowed is known only after the closure has run")
        if self._accumulation.steps > 1:
            steps = self._accumulation.steps
            why.append(f"gradient_accumulation_steps={steps}: it would see only the last micro-batch")
        if self._admits is not None:
            why.append(
                "anomalies are looked for: whether the step may be taken is known only after the closure has run"
            )
        if why:
            raise TrainError(
                "optimizer-closure",
                f"{type(self.optimizer).__name__} cannot step with a closure in this run.",
                why=why,
                fix="compute one whole batch a step, in bf16 or float32; or call `step()` without a closure",
            )

        def evaluate() -> float:
            self._corrected = False
            loss = closure()
            self.correct_gradients()
            return self._accumulation.over_ranks(loss)

        self.steps += 1
        result = self.optimizer.step(evaluate)
        self._corrected = False
        self._runtime.stepped(self, self._accumulation)
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients where the window ends; nothing in between. They become None, unless the script says otherwise."""
        if self._accumulation.sync:
            if set_to_none is None and not self._takes_set_to_none:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none is not False)
            self._corrected = False
            self._passes_done = self._accumulation.passes

    def leave_out(self) -> None:
        """Ends the window without a step: its gradients are never stepped, and the loss scale hears nothing of them."""
        self.step_was_skipped = True
        self._corrected = False
        self._passes_done = self._accumulation.passes
        if self._scaler is not None:
            self._scaler.forget(self.optimizer)

    @property
    def passes_done(self) -> int:
        """Backward passes of the run whose gradients this optimizer has stepped, cleared or left out."""
        return self._passes_done

    @property
    def stale(self) -> bool:
        """Whether its gradients, if there are any, have been stepped: a window has ended, and nothing came since."""
        return self._accumulation.sync and self._passes_done == self._accumulation.passes

    @property
    def pending(self) -> bool:
        """Whether a backward pass came since its last step whose gradients were not cleared either."""
        return self._accumulation.passes > max(self._passes_done, 0)

    def restart(self, steps: int) -> None:
        """After a load: goes on after so many steps, with gradients that were loaded too."""
        self.steps = steps
        self._corrected = False
        self._passes_done = -1
        if steps:
            # torch's schedulers warn where they are stepped before their optimizer, which they ask for this mark. A run
            # that goes on at the end of an epoch steps them first, rightly.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def correct_gradients(self) -> None:
        """Multiplies the gradients by the window's correction, once; see `Accumulation`."""
        if self._corrected:
            return
        if not self._accumulation.began:
            self._check_backward()
        self._corrected = True
        factor = self._accumulation.correction()
        if factor != 1.0 and (gradients := self._local_gradients()):
            torch._foreach_mul_(gradients, factor)

    def _local_gradients(self) -> list[torch.Tensor]:
        """This rank's parts of all gradients that are there."""
        return [local(parameter.grad) for parameter in parameters_of(self) if parameter.grad is not None]

    def _check_backward(self) -> None:
        """Refuses gradients that other ranks, or the loss scale, know nothing of."""
        if self._scaler is not None:
            why = "mixed_precision='fp16': gradients are divided by the loss scale, which the loss was never multiplied by"
        elif self._accumulation.width > 1 and self._local_gradients():
            why = f"{self._accumulation.width} ranks: their gradients were not averaged, so the ranks would drift apart"
        else:
            return
        raise TrainError(
            "backward-missing",
            "an optimizer would step, but `accelerator.backward` was never called.",
            why=why,
            fix="write `accelerator.backward(loss)` in place of `loss.backward()`",
        )

    def unscale(self) -> None:
        """Corrected and unscaled gradients, as clipping and logging need them; does nothing inside a window."""
        if self._accumulation.sync:
            self.correct_gradients()
            if self._scaler is not None:
                self._scaler.unscale(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """For schedule-free optimizers, which average weights outside training."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """For schedule-free optimizers."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_guard": nullcontext, "_admits": None}  # the run's own, which a copy leaves behind

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
