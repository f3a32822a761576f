"""`Strategy` and the chain: a run is an ordered list of small model passes, one file each.

    stage   pass         serves     what it does
    10      pipeline     pp         keeps this rank's blocks
    20      tensor       tp         divides the matrices of layers
    30      context      cp         divides sequences
    35      batch_norm              takes batch statistics over all data-parallel ranks
    40      recompute               computes activations again in the backward pass
    50      compile                 compiles the repeated blocks
    60      zero, shard  shard      divides optimizer states, gradients, parameters
    90      replicate    replicate  averages gradients

    plan.strategies          ("tensor", "shard")   resolved, checked, frozen
      -> Chain.apply         for each, by stage:  model = strategy.apply(model, context)
      -> Chain.bind          optimizers, once they hold the prepared parameters
      -> Chain.hold_gradients(model)               all of them hold back their communication
      -> Chain.settle(model)                       at the end of a window: its gradients are final on all ranks
      -> Chain.unwrap(model)                       the module that the user wrote

A new strategy is one new file with `STRATEGY = Class()`; the registry finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.base.errors import Problem
from paceline.base.registry import Registry
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import NoOptions, read
from paceline.plan.plan import Decision, Plan
from paceline.world.held import Held

STRATEGIES = Registry("paceline.parallel", "STRATEGY", "paceline.strategies")


@dataclass(frozen=True)
class Context:
    """What a strategy may use besides the model.

    Attributes:
        plan: the resolved plan.
        mesh: the groups.
        collectives: of all ranks.
        device: where the model is.
        facts: what planning knew of the model.
        options: those of the strategy at hand, an instance of its `Options`.
        idle: whether this rank's batch at the moment stands for no sample, and has a filler row instead.
    """

    plan: Plan
    mesh: Any
    collectives: Any
    device: torch.device
    facts: ModelFacts
    options: Any
    idle: Callable[[], bool] = lambda: False


class Strategy:
    """One axis of parallelism, or one transformation of the model; each method here does nothing.

    `wanted`, `concerns`, `check`, `decide` and `cost` are pure: no group, no device, no model. The others are called by every
    rank alike, and may communicate. Parameters of `unwrap(apply(model))` have the names (FQNs) that they had.

    Attributes:
        name: the file's name, and that of its options.
        stage: passes are applied in ascending order of stages.
        axes: the axes of the layout that it serves.
        Options: a frozen dataclass; see `plan.options`.
    """

    name: str
    stage: int
    axes: tuple[str, ...] = ()
    Options: ClassVar[type] = NoOptions

    def wanted(self, plan: Plan) -> bool:
        """Whether the plan uses this strategy."""
        return any(getattr(plan.layout, axis) > 1 for axis in self.axes)

    def concerns(self, models: Iterable[ModelFacts]) -> bool:
        """Whether it has anything to do for some of these models; otherwise the plan leaves it out."""
        return True

    def options(self, plan: Plan) -> Any:
        """What the plan says for this strategy; wrong values, which `resolve` refuses, as their defaults."""
        return read(self.Options, plan.options.get(self.name, {}), self.name)[0]

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """What keeps this strategy from working on the model; empty where nothing does."""
        return []

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """What it chose where the plan left a choice, each with its reason."""
        return []

    def cost(self, plan: Plan, facts: ModelFacts, held: Bytes) -> Bytes:
        """Bytes on one rank, given those of the strategies before this one."""
        return held

    def apply(self, model: nn.Module, context: Context) -> nn.Module:
        """Transforms the model, in place or by wrapping."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside, where `apply` wrapped it; the module itself otherwise."""
        return model

    def bind(self, optimizer: Optimizer, model: nn.Module, context: Context) -> list[Decision] | None:
        """Called once for each optimizer that steps parameters of `model`, which it holds by now.

        Returns:
            What was chosen for this optimizer, where there was a choice.
        """
        return None

    def hold_gradients(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While it is open, backward passes accumulate without communication."""
        return nullcontext()

    def settle(self, model: nn.Module) -> None:
        """At the end of a window: reduces gradients that were held until now, and checks that all were reduced."""

    def failed(self, model: nn.Module) -> None:
        """A backward pass of some model ended with an error; the next one must not meet what it left. Must not wait."""

    def full(self, model: nn.Module, writeback: bool) -> AbstractContextManager[Any]:
        """While it is open, parameters are whole plain tensors; `writeback` takes changes over."""
        return nullcontext()

    def gather_state(self, state: dict[str, Any], model: nn.Module, context: Context) -> dict[str, Any]:
        """Adds what only other ranks hold to a state of whole tensors."""
        return state

    def held(self, model: nn.Module) -> Held:
        """What this rank keeps of gradients beside `.grad`, for a checkpoint in the middle of a window. Ranks: all."""
        return Held()

    def take(self, model: nn.Module, held: Held) -> None:
        """Drops what `held` would give, and takes that of a checkpoint in its place. Ranks: all; may communicate."""


class Chain:
    """The strategies of one plan, applied to models in order.

    Args:
        plan: the resolved plan.
        mesh, collectives, device: where and with whom.
        facts: of the model that the chain is for.
        idle: whether this rank's batch at the moment stands for no sample.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: Any,
        collectives: Any,
        device: torch.device,
        facts: ModelFacts,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan = plan
        self.strategies: list[Strategy] = [STRATEGIES.get(name) for name in plan.strategies]
        self._contexts = [
            Context(plan, mesh, collectives, device, facts, strategy.options(plan), idle)
            for strategy in self.strategies
        ]

    @property
    def runner(self) -> Any:
        """The strategy that runs forward and backward itself (a pipeline); None where the loop does."""
        return next((each for each in self.strategies if hasattr(each, "forward_backward")), None)

    def apply(self, model: nn.Module) -> nn.Module:
        """Applies every strategy in turn. Every rank calls it."""
        for strategy, context in zip(self.strategies, self._contexts, strict=True):
            model = strategy.apply(model, context)
        return model

    def bind(self, optimizer: Optimizer, model: nn.Module) -> list[Decision]:
        """Lets every strategy see an optimizer that steps parameters of this model; says what they chose for it."""
        made: list[Decision] = []
        for strategy, context, inside in self._inwards(model):
            made.extend(strategy.bind(optimizer, inside, context) or ())
        return made

    def full(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[Any]:
        """While it is open, parameters are whole plain tensors. Every rank opens it."""
        stack = ExitStack()
        for strategy, _, inside in self._inwards(model):
            stack.enter_context(strategy.full(inside, writeback))
        return stack

    def gather_state(self, state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Adds what only other ranks hold to a state of whole tensors. Every rank calls it, and gets all."""
        for strategy, context, inside in self._inwards(model):
            state = strategy.gather_state(state, inside, context)
        return state

    def _inwards(self, model: nn.Module) -> Iterable[tuple[Strategy, Context, nn.Module]]:
        for strategy, context in zip(reversed(self.strategies), reversed(self._contexts), strict=True):
            yield strategy, context, model
            model = strategy.unwrap(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Takes off what `apply` put on, the outermost first."""
        for strategy in reversed(self.strategies):
            model = strategy.unwrap(model)
        return model

    def held(self, model: nn.Module) -> dict[str, Held]:
        """What each strategy keeps of gradients beside `.grad`. Ranks: all."""
        found = {strategy.name: strategy.held(inside) for strategy, _, inside in self._inwards(model)}
        return {name: held for name, held in found.items() if held}

    def take(self, model: nn.Module, held: Mapping[str, Held]) -> None:
        """Gives back to each strategy what `held` gave; those that are not named drop what they keep. Ranks: all."""
        for strategy, _, inside in self._inwards(model):
            strategy.take(inside, held.get(strategy.name, Held()))

    def hold_gradients(self, model: nn.Module) -> AbstractContextManager[Any]:
        """While it is open, no strategy communicates gradients of `model`."""
        if not self.strategies:
            return nullcontext()
        if len(self.strategies) == 1:
            return self.strategies[0].hold_gradients(model)
        stack = ExitStack()
        for strategy in reversed(self.strategies):
            stack.enter_context(strategy.hold_gradients(model))
            model = strategy.unwrap(model)
        return stack

    def settle(self, model: nn.Module) -> None:
        """At the end of a window, after its last backward pass."""
        for strategy in reversed(self.strategies):
            strategy.settle(model)
            model = strategy.unwrap(model)

    def failed(self, model: nn.Module) -> None:
        """Where a backward pass ended with an error."""
        for strategy in reversed(self.strategies):
            strategy.failed(model)
            model = strategy.unwrap(model)
