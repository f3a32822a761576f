"""`Chain`: the strategies of one plan, applied to one model in order, and what each of them keeps of it.

    plan.strategies                ("tensor", "shard")   resolved, checked, frozen
      -> Chain.apply(model, ...)   for each, by stage: `strategy.apply(model, context)` -> an `AppliedStrategy`
      -> chain.bind                optimizers, once they hold the prepared parameters
      -> chain.hold_gradients      all of them hold back their communication
      -> chain.finish_reduction    at the end of a window: its gradients are final on all ranks

What runs around the model (all methods but `apply`) goes from the outermost strategy inwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.parallel.strategy import STRATEGIES, AppliedStrategy, Context, Runner, Strategy
from paceline.plan.plan import Decision, Plan
from paceline.world.collectives import Collectives
from paceline.world.pending_gradients import PendingGradients


class Chain:
    """What the strategies of a plan did to one model.

    Args:
        plan: the resolved plan.
        model: as the user wrote it.
        applied: by the strategies' names, the innermost first.

    Attributes:
        plan: as given.
        module: the module that the user wrote.
        wrapped: the outermost module, which the loop calls.
        runner: the applied strategy that runs forward and backward passes itself (a pipeline); None where the loop does.
    """

    def __init__(self, plan: Plan, model: nn.Module, applied: dict[str, AppliedStrategy]) -> None:
        self.plan = plan
        self.module = self.wrapped = model
        self.runner: Runner | None = None
        for outcome in applied.values():
            self.wrapped = outcome.wrapped
            if isinstance(outcome, Runner):
                self.runner = outcome
        self._inwards = dict(reversed(applied.items()))

    @classmethod
    def apply(cls, model: nn.Module, context: Context) -> Chain:
        """Applies every strategy of the plan in turn. Ranks: all.

        Args:
            model: changed in place.
            context: without options and runner, which are each strategy's own.
        """
        applied: dict[str, AppliedStrategy] = {}
        wrapped = model
        for name in context.plan.strategies:
            strategy: Strategy = STRATEGIES.get(name)
            # Each strategy wraps what the one before it returned, so the order of the plan is the order of nesting.
            context = replace(context, options=strategy.options(context.plan))
            outcome = strategy.apply(wrapped, context)
            applied[name] = outcome
            wrapped = outcome.wrapped
            # Strategies that follow must know it: under a pipeline they work on stages, and not on the whole model.
            if isinstance(outcome, Runner):
                context = replace(context, runner=outcome)
        return cls(context.plan, model, applied)

    def __iter__(self) -> Iterator[AppliedStrategy]:
        return iter(self._inwards.values())

    @property
    def owners(self) -> Collectives | None:
        """The ranks each of which owns other parameters of the model; None where there are none."""
        return next((applied.owners for applied in self if applied.owners is not None), None)

    def owned_elsewhere(self) -> set[int]:
        """The `id` of each parameter here that another of the `owners` counts as its own."""
        return set().union(*(applied.owned_elsewhere() for applied in self))

    @property
    def parameters_on_host(self) -> bool:
        """Whether parameters wait in the host's memory."""
        return any(applied.parameters_on_host for applied in self)

    def bind(self, optimizer: Optimizer) -> list[Decision]:
        """Lets every strategy see an optimizer that steps parameters of this model; says what they chose for it."""
        decisions: list[Decision] = []
        for applied in self:
            decisions += applied.bind(optimizer)
        return decisions

    def hold_gradients(self) -> AbstractContextManager[Any]:
        """While it is open, no strategy communicates gradients of the model."""
        return _all_open(applied.hold_gradients() for applied in self)

    def finish_reduction(self) -> None:
        """At the end of a window, after its last backward pass. Ranks: all."""
        for applied in self:
            applied.finish_reduction()

    def backward_failed(self) -> None:
        """Where a backward pass ended with an error."""
        for applied in self:
            applied.backward_failed()

    def full_parameters(self, writeback: bool = False) -> AbstractContextManager[Any]:
        """While it is open, parameters are whole plain tensors. Ranks: all open it."""
        return _all_open(applied.full_parameters(writeback) for applied in self)

    def reshard(self) -> None:
        """Gives up whole copies of divided parameters that a pass has left behind."""
        for applied in self:
            applied.reshard()

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Adds what only other ranks hold to a state of whole tensors. Ranks: all; all get all of it."""
        for applied in self:
            state = applied.gather_state(state)
        return state

    def pending_gradients(self) -> dict[str, PendingGradients]:
        """What each strategy keeps of gradients beside `.grad`, by its name. Ranks: all."""
        pending = {name: applied.pending_gradients() for name, applied in self._inwards.items()}
        return {name: gradients for name, gradients in pending.items() if gradients}

    def restore_pending(self, pending: Mapping[str, PendingGradients]) -> None:
        """Gives back what `pending_gradients` gave; strategies that are not named drop what they keep. Ranks: all."""
        for name, applied in self._inwards.items():
            applied.restore_pending(pending.get(name, PendingGradients()))

    def uneven_steps(self) -> AbstractContextManager[Any]:
        """While it is open, ranks may take different numbers of steps."""
        return _all_open(applied.uneven_steps() for applied in self)


def _all_open(contexts: Iterable[AbstractContextManager[Any]]) -> ExitStack:
    """Enters contexts now, the outermost strategy's first; what it returns leaves them."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
