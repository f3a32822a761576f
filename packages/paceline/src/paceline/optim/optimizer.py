"""The prepared optimizer: it steps at the end of a window, on unscaled gradients that did not overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from paceline.base.errors import TrainError
from paceline.optim.accumulate import Accumulation
from paceline.torch_internals.optimizers import mark_as_stepped
from paceline.world.events import Event
from paceline.world.param_groups import inner_optimizers, parameters_of


class Scaler(Protocol):
    """The methods of a loss scaler (`precision.scaler.LossScaler`) that are used here."""

    @property
    def loss_scale(self) -> float: ...
    def look_for_changes(self, parameters: Iterable[torch.Tensor]) -> None: ...
    def unscale(self, parameters: Iterable[torch.Tensor], optimizers: Sequence[Optimizer]) -> None: ...
    def step(self, optimizer: Optimizer) -> bool: ...
    def forget(self, parameters: Iterable[torch.Tensor]) -> None: ...


def _just_call(step: Callable[[], Any]) -> Any:
    return step()


def _of_wrapped(name: str) -> property:
    """Returns a property that reads and sets an attribute of the wrapped optimizer."""

    def get(self: PreparedOptimizer) -> Any:
        return getattr(self.optimizer, name)

    def replace(self: PreparedOptimizer, value: object) -> None:
        setattr(self.optimizer, name, value)

    return property(get, replace)


class PreparedOptimizer(Optimizer):
    """Wraps an optimizer. The loop calls `step` and `zero_grad` after each micro-batch, as with any optimizer.

    It is an `Optimizer` for learning-rate schedulers and for `isinstance`. Its `param_groups` and `state` are those of the
    wrapped optimizer.

    Args:
        optimizer: the user's, rebound to the prepared parameters.
        accumulation: knows whether a window ends.
        scaler: the loss scaler, or None.
        take_step: takes each step, by calling what it is given, and returns its result.
        admits: decides, on the final gradients of a window, whether they are stepped; None if they always are.
        stepped: is told of each step.

    Attributes:
        optimizer: the wrapped optimizer.
        step_was_skipped: whether the last `step` was skipped because of an overflow or an anomaly.
        steps: the number of steps so far, including skipped ones.
        stepped_through: the optimizers through which the wrapped one steps, if it is one such as SAM.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        scaler: Scaler | None = None,
        take_step: Callable[[Callable[[], Any]], Any] = _just_call,
        admits: Callable[[PreparedOptimizer], bool] | None = None,
        stepped: Event[[Optimizer]] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.step_was_skipped = False
        self.steps = 0
        self.stepped_through = inner_optimizers(optimizer)
        self._accumulation = accumulation
        self._scaler = scaler
        self._take_step = take_step
        self._admits = admits
        self._stepped: Event[[Optimizer]] = Event() if stepped is None else stepped
        # An optimizer of a script's own may have a `zero_grad` without arguments.
        self._takes_set_to_none = "set_to_none" in signature(optimizer.zero_grad).parameters
        self._is_stepping = False
        self._passes_done = 0  # backward passes of the run whose gradients were stepped or cleared

    # Schedulers and users read and replace these attributes of the wrapper.
    param_groups = _of_wrapped("param_groups")
    state = _of_wrapped("state")
    defaults = _of_wrapped("defaults")

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.__dict__["optimizer"], name)

    @property
    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied; 1.0 unless the precision is fp16."""
        if self._scaler is None:
            return 1.0
        return self._scaler.loss_scale

    cur_scale = loss_scale  # the name of this attribute in other libraries

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one optimizer step at the end of a window; inside of a window it does nothing.

        Args:
            closure: computes the loss and its gradients and returns the loss, as LBFGS needs. The optimizer gets the mean
                over all ranks, so that the line searches of all ranks are the same.

        Ranks: all.

        Raises:
            TrainError: `fp16-loss` under fp16, if the loss is not finite; `optimizer-closure`; `backward-missing`.
        """
        if closure is not None:
            return self._search(closure)
        parameters = parameters_of(self.optimizer)
        if not self._accumulation.ends(parameters):
            return None
        if self._scaler is not None:
            self._scaler.look_for_changes(parameters)
        self._finish_gradients(parameters)
        self.steps += 1
        result = None
        if self._admits is not None and not self._admits(self):
            self.leave_out()
            self._stepped(self)
            return None
        self._passes_done = self._accumulation.passes
        self._is_stepping = True
        try:
            if self._scaler is None:
                self.step_was_skipped = False
                result = self._take_step(self.optimizer.step)
            else:
                self.step_was_skipped = self._take_step(partial(self._scaler.step, self.optimizer))
        finally:
            self._is_stepping = False
        self._stepped(self)
        return result

    def _search(self, closure: Callable[[], float]) -> float:
        """Takes a step that may call its closure several times, as the line search of LBFGS does."""
        why = []
        if self._scaler is not None:
            why.append("mixed_precision='fp16': whether a gradient overflowed is known only after the closure has run")
        if self._accumulation.steps > 1:
            steps = self._accumulation.steps
            why.append(f"gradient_accumulation_steps={steps}: it would see only the last micro-batch")
        if self._admits is not None:
            why.append("`anomalies` are set: whether the step may be taken is known only after the closure has run")
        if why:
            raise TrainError(
                "optimizer-closure",
                f"{type(self.optimizer).__name__} cannot step with a closure in this run.",
                why=why,
                fix="compute one whole batch a step, in bf16 or float32; or call `step()` without a closure",
            )

        def evaluate() -> float:
            passes_before = self._accumulation.passes
            loss = closure()
            self._finish_gradients(parameters_of(self.optimizer))
            return self._accumulation.over_ranks(loss, passes_before)

        self.steps += 1
        self._is_stepping = True
        try:
            result = self.optimizer.step(evaluate)
        finally:
            self._is_stepping = False
        self._stepped(self)
        return result

    def step_through(self, inner: Optimizer) -> None:
        """Called before one of `stepped_through` steps. If no `step` has led to it, this counts as one.

        Raises:
            TrainError: `optimizer-inner`, if only `step` could decide what becomes of the gradients.
        """
        if self._is_stepping:
            return
        kind = type(self.optimizer).__name__
        if not self._accumulation.ends(parameters_of(self.optimizer)):
            steps = self._accumulation.steps
            why = f"gradient_accumulation_steps={steps}: the window has not ended, and only `step` of {kind} waits for that"
            fix = "call the method that steps at the end of a window only: `if accelerator.sync_gradients:`"
        elif self._scaler is not None:
            why = f"mixed_precision='fp16': only `step` of {kind} unscales gradients and leaves out a step that overflowed"
            fix = "use mixed_precision='bf16' or 'no'"
        elif self._admits is not None:
            why = f"`anomalies` are set: only `step` of {kind} asks whether the step may be taken"
            fix = "leave `anomalies` out"
        else:
            self._finish_gradients(parameters_of(self.optimizer))
            self.steps += 1
            self._passes_done = self._accumulation.passes
            return
        what = f"{type(inner).__name__} inside of {kind} would step by another method than `step`."
        raise TrainError("optimizer-inner", what, why=why, fix=fix)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients, but not those that wait for the rest of their window. Gradients become None by default."""
        parameters = parameters_of(self.optimizer)
        kept = self._accumulation.kept(parameters)
        if not kept:
            if set_to_none is None and not self._takes_set_to_none:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none is not False)
            self._passes_done = self._accumulation.passes
        else:
            others = []
            for parameter in parameters:
                if parameter not in kept and parameter.grad is not None:
                    others.append(parameter)
            if not others:
                return
            # They have joined in the middle of the window, with gradients from before it.
            torch.optim.SGD(others).zero_grad(set_to_none is not False)
            parameters = others
        self._accumulation.forget(parameters)
        if self._scaler is not None:
            self._scaler.forget(parameters)

    def leave_out(self) -> None:
        """Ends the window without a step: its gradients are never stepped, and do not change the loss scale."""
        self.step_was_skipped = True
        self._passes_done = self._accumulation.passes

    @property
    def passes_done(self) -> int:
        """The number of backward passes of the run until this optimizer has stepped, cleared or left out gradients last."""
        return self._passes_done

    @property
    def stale(self) -> bool:
        """Whether its gradients, if there are any, were stepped already, and no backward pass has run since."""
        return self._accumulation.ends(parameters_of(self.optimizer)) and self._passes_done == self._accumulation.passes

    @property
    def pending(self) -> bool:
        """Whether a backward pass has run since its gradients were stepped or cleared last."""
        return self._accumulation.passes > max(self._passes_done, 0)

    def restart(self, steps: int) -> None:
        """Sets the number of steps after a load, which may have restored gradients, too."""
        self.steps = steps
        self._passes_done = -1
        if steps:
            # A scheduler of torch warns if it is stepped before its optimizer. A run that
            # resumes at the end of an epoch steps the scheduler first, and is right to do so.
            mark_as_stepped(self.optimizer)

    def _finish_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Makes sure that the gradients are those of the window's mean. Ranks: all."""
        if not self._accumulation.began:
            self._check_backward()
        self._accumulation.settle(parameters)

    def _check_backward(self) -> None:
        """Refuses gradients of a loss that was not scaled, or that were not averaged over the ranks."""
        if self._scaler is not None:
            why = "mixed_precision='fp16': gradients are divided by the loss scale, by which the loss was never multiplied"
        elif self._accumulation.width > 1 and any(
            parameter.grad is not None for parameter in parameters_of(self.optimizer)
        ):
            why = f"{self._accumulation.width} ranks: gradients were not averaged, so their parameters would become different"
        else:
            return
        raise TrainError(
            "backward-missing",
            "an optimizer would step, but `accelerator.backward` was never called.",
            why=why,
            fix="write `accelerator.backward(loss)` in place of `loss.backward()`; for gradients that you compute in another "
            "way, `accelerator.backward(sum((p * g).sum() for p, g in zip(model.parameters(), gradients)))` averages them",
        )

    def unscale(self) -> None:
        """Makes gradients final, as clipping and logging need them; inside of a window it does nothing. Ranks: all."""
        parameters = parameters_of(self.optimizer)
        if self._accumulation.ends(parameters):
            self._finish_gradients(parameters)
            if self._scaler is not None:
                self._scaler.unscale(parameters, [self.optimizer])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switches a schedule-free optimizer to training; it averages weights for evaluation."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Switches a schedule-free optimizer to evaluation."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not belong to the run.
        return {**self.__dict__, "_take_step": _just_call, "_admits": None, "_stepped": Event()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
