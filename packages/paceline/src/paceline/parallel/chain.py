"""`Chain`: the strategies of one plan, applied to one model.

    plan.strategies                ("tensor", "shard")   resolved, checked, frozen
      -> Chain.apply(model, ...)   for each, by stage: `strategy.apply(model, context)` -> an `AppliedStrategy`
      -> chain.strategies          from the outermost to the innermost, as in all methods below

What a strategy is asked in one place alone is no method here: `Prepared.applied_strategies` has those of all models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from paceline.parallel.strategy import STRATEGIES, AppliedStrategy, Context, Runner, Strategy
from paceline.plan.plan import Plan
from paceline.world.collectives import Collectives
from paceline.world.pending_gradients import PendingGradients
from paceline.world.sharded import any_sharded


class Chain:
    """The strategies that were applied to one model.

    Args:
        plan: the resolved plan.
        model: the module that the user wrote.
        applied: the applied strategies by name, the innermost first.

    Attributes:
        plan: the resolved plan.
        module: the module that the user wrote.
        wrapped: the outermost module, which the training loop calls.
        strategies: what was applied, from the outermost to the innermost.
        runner: the applied strategy that runs forward and backward passes together (a pipeline), or None.
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
        self.strategies = tuple(self._inwards.values())

    @classmethod
    def apply(cls, model: nn.Module, context: Context) -> Chain:
        """Applies every strategy of the plan in turn. Ranks: all.

        Args:
            model: the user's module, which is changed in place.
            context: for all strategies; its `options` and `runner` are set here for each of them.
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
        if any_sharded(model.parameters()):
            from paceline.parallel.assigned_data import refuse_assigned_data

            refuse_assigned_data(model)
        return cls(context.plan, model, applied)

    @property
    def owners(self) -> Collectives | None:
        """The ranks that hold different parameters of the model (stages of a pipeline); None if all hold the same."""
        for applied in self.strategies:
            if applied.owners is not None:
                return applied.owners
        return None

    def hold_gradients(self, alone: bool = False) -> AbstractContextManager[Any]:
        """While it is open, no strategy communicates gradients of the model."""
        return _all_open(applied.hold_gradients(alone) for applied in self.strategies)

    def full_parameters(self, writeback: bool = False) -> AbstractContextManager[Any]:
        """While it is open, parameters are unsharded plain tensors. Ranks: all."""
        return _all_open(applied.full_parameters(writeback) for applied in self.strategies)

    def shards_of(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Returns the parameters that optimizers step, see `AppliedStrategy.shards_of`."""
        for applied in self.strategies:
            parameters = applied.shards_of(parameters)
        return parameters

    def pending_gradients(self) -> dict[str, PendingGradients]:
        """Returns the gradients that each strategy holds beside `.grad`, by its name. Ranks: all."""
        pending: dict[str, PendingGradients] = {}
        for name, applied in self._inwards.items():
            gradients = applied.pending_gradients()
            if gradients:
                pending[name] = gradients
        return pending

    def restore_pending(self, pending: Mapping[str, PendingGradients]) -> None:
        """Restores what `pending_gradients` returned; a strategy that is not named drops its gradients. Ranks: all."""
        for name, applied in self._inwards.items():
            applied.restore_pending(pending.get(name, PendingGradients()))


def _all_open(contexts: Iterable[AbstractContextManager[Any]]) -> ExitStack:
    """Enters the contexts, the outermost strategy's first, and returns a context manager that exits them."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
