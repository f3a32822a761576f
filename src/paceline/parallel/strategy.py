"""The `Strategy` protocol and the chain: a run is an ordered list of small model passes, one file each.

    plan.strategies          ("replicate",)        resolved, checked, frozen
      -> Chain.apply         for each, by stage:  model = strategy.apply(model, context)
      -> Chain.hold_gradients(model)               all of them hold back their communication
      -> Chain.settle(model)                       after a synchronised backward
      -> Chain.unwrap(model)                       the module that the user wrote

A new strategy is one new file with `STRATEGY = Class()`; the registry finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from paceline.base.errors import Problem
from paceline.base.registry import Registry
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan

STRATEGIES = Registry("paceline.parallel", "STRATEGY", "paceline.strategies")


@dataclass(frozen=True)
class Cost:
    """What a strategy adds on one rank: bytes held, and bytes sent in one optimizer step."""

    held_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class Context:
    """What `apply` may use: the plan, the groups and the device. Options are those of the strategy at hand."""

    plan: Plan
    mesh: Any
    collectives: Any
    device: torch.device
    options: Mapping[str, Any]


class Strategy(Protocol):
    """One axis of parallelism (or one transformation of the model).

    `wanted`, `check` and `cost` are pure. `apply` alone touches the model; every rank calls it, and it may communicate.
    """

    name: str
    stage: int
    axes: tuple[str, ...]

    def wanted(self, plan: Plan) -> bool:
        """Whether the plan uses this strategy."""
        ...

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """What keeps this strategy from working on the model; empty where nothing does."""
        ...

    def cost(self, plan: Plan, facts: ModelFacts) -> Cost:
        """Bytes that it holds and sends on one rank."""
        ...

    def apply(self, model: nn.Module, context: Context) -> nn.Module:
        """Transforms the model; the names of its parameters (FQNs) within `unwrap(result)` stay as they were."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The module inside, where `apply` wrapped it; the module itself otherwise."""
        ...

    def hold_gradients(self, model: nn.Module) -> AbstractContextManager[None]:
        """While it is open, backward passes accumulate without communication."""
        ...

    def settle(self, model: nn.Module) -> None:
        """Called after each backward pass that communicated, on every rank; checks that it went through."""
        ...


class Chain:
    """The strategies of one plan, applied to models in order.

    Args:
        plan: the resolved plan.
        context: everything but the options, which are taken from the plan by each strategy's name.
    """

    def __init__(self, plan: Plan, mesh: Any, collectives: Any, device: torch.device) -> None:
        self.plan = plan
        self.strategies: list[Strategy] = [STRATEGIES.get(name) for name in plan.strategies]
        self._contexts = [
            Context(plan, mesh, collectives, device, plan.options.get(strategy.name, {}))
            for strategy in self.strategies
        ]

    def apply(self, model: nn.Module) -> nn.Module:
        """Applies every strategy in turn. Every rank calls it."""
        for strategy, context in zip(self.strategies, self._contexts, strict=True):
            model = strategy.apply(model, context)
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Takes off what `apply` put on, the outermost first."""
        for strategy in reversed(self.strategies):
            model = strategy.unwrap(model)
        return model

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
        """After a synchronised backward pass."""
        for strategy in reversed(self.strategies):
            strategy.settle(model)
            model = strategy.unwrap(model)
