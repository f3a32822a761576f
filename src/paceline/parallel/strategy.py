"""`Strategy`, one axis of parallelism or one transformation of models, and `AppliedStrategy`, what it did to one of them.

    stage   pass         serves     what it does
    10      pipeline     pp         keeps this rank's blocks
    20      tensor       tp         divides the matrices of layers
    30      context      cp         divides sequences
    35      batch_norm              takes batch statistics over all data-parallel ranks
    40      recompute               computes activations again in the backward pass
    50      compile                 compiles the repeated blocks
    60      zero, shard  shard      divides optimizer states, gradients, parameters
    70      offload                 keeps optimizer states in the host's memory
    90      replicate    replicate  averages gradients

A `Strategy` is pure: one object serves every plan and every model, and keeps nothing. All state belongs to the
`AppliedStrategy` that its `apply` returns, one for each model; the model's `Chain` (see `parallel.chain`) keeps those.

A new strategy is one new file with `STRATEGY = Class()`, here or in a package; the registry finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import Problem
from paceline.base.registry import Registry
from paceline.parallel.microbatches import Part
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import NoOptions, read
from paceline.plan.plan import Decision, Plan
from paceline.world.collectives import Collectives
from paceline.world.mesh import Mesh
from paceline.world.pending_gradients import PendingGradients

STRATEGIES = Registry("paceline.parallel", "STRATEGY", "paceline.strategies")


class AppliedStrategy:
    """What one strategy did to ONE model, and the state that it keeps of it; each method here does nothing.

    All methods are called by every rank alike, and may communicate, unless they say otherwise. Parameters of `module` have
    the names (FQNs) that they had before.

    Attributes:
        wrapped: the model as the strategy leaves it, for the next strategy and in the end for the loop.
        module: what is inside of `wrapped`; the same object where the strategy works in place.
        owners: the ranks each of which owns other parameters of this model, as plain tensors or as DTensors that do not
            name the others in their mesh; None where all ranks hold the same ones, or parts of the same ones.
        parameters_on_host: whether parameters wait in the host's memory while they are not needed.
    """

    owners: Collectives | None = None
    parameters_on_host: bool = False

    def __init__(self, wrapped: nn.Module, module: nn.Module | None = None) -> None:
        self.wrapped = wrapped
        self.module = wrapped if module is None else module

    def bind(self, optimizer: Optimizer) -> list[Decision]:
        """Called once for each optimizer that steps parameters of the model, which it holds by now.

        Returns:
            What was chosen for this optimizer, where there was a choice.
        """
        return []

    def hold_gradients(self) -> AbstractContextManager[None]:
        """While it is open, backward passes accumulate gradients without communication."""
        return nullcontext()

    def finish_reduction(self) -> None:
        """At the end of a window: reduces gradients that were held back, and checks that all were reduced."""

    def call_before_waiting(self, callback: Callable[[], None]) -> None:
        """Calls `callback` after the last operation of each backward pass that then waits for gradients of other ranks."""

    def backward_failed(self) -> None:
        """A backward pass of some model ended with an error; the next one must not meet what it left. Must not wait."""

    def full_parameters(self, writeback: bool) -> AbstractContextManager[None]:
        """While it is open, parameters are whole plain tensors; `writeback` takes changes over."""
        return nullcontext()

    def reshard(self) -> None:
        """Gives up whole copies of divided parameters that a pass has left behind. Does not communicate."""

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Adds what only other ranks hold to a state of whole tensors."""
        return state

    def pending_gradients(self) -> PendingGradients:
        """What this rank keeps of gradients beside `.grad`, for a checkpoint in the middle of a window."""
        return PendingGradients()

    def restore_pending(self, pending: PendingGradients) -> None:
        """Drops what `pending_gradients` would give, and takes that of a checkpoint in its place."""

    def owned_elsewhere(self) -> set[int]:
        """The `id` of each parameter here that another of the `owners` counts as its own."""
        return set()

    def uneven_steps(self) -> AbstractContextManager[None]:
        """While it is open, ranks may take different numbers of steps, so that no forward pass may wait for another rank."""
        return nullcontext()


class Runner(AppliedStrategy, ABC):
    """An applied strategy that runs forward and backward passes itself, since `loss.backward()` cannot: a pipeline.

    Attributes:
        owners: the ranks that hold the stages.
        begins: numbers of the blocks with which stages begin.
        first_blocks: the names of these blocks.
    """

    owners: Collectives
    begins: tuple[int, ...]
    first_blocks: tuple[str, ...]

    @abstractmethod
    def forward_backward(self, batch: Part, loss_fn: Callable[..., Tensor], factor: Tensor, mean: bool) -> Tensor:
        """One batch, forward and backward; gradients stay on their ranks.

        Args:
            batch: of the model's arguments, tensors whose dim 0 is the number of its rows are divided into micro-batches,
                and so is the target; all else goes to each micro-batch.
            loss_fn: called with a micro-batch's output and target.
            factor: what the whole batch's loss is multiplied by before the backward pass, 0-dim.
            mean: whether `loss_fn` gives the mean over rows rather than a sum.

        Returns:
            The batch's loss, 0-dim, detached.

        Ranks: all `owners`, with the same batch; all get the loss.
        """

    @abstractmethod
    def forward_backward_each(
        self, parts: Sequence[Part], loss_fn: Callable[..., Tensor], factor: Tensor, mean: bool
    ) -> Tensor:
        """The same for micro-batches that were made elsewhere; each counts the same, and shapes may differ."""

    @abstractmethod
    def follow(self, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Opens `phase("forward")` and `phase("backward")` around what this rank computes from now on."""


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
        siblings: gives what was applied to all models of the run.
        runner: what an earlier strategy of the chain made to run this model's passes.
    """

    plan: Plan
    mesh: Mesh
    collectives: Collectives
    device: torch.device
    facts: ModelFacts
    options: Any = None
    idle: Callable[[], bool] = lambda: False
    siblings: Callable[[], Iterable[AppliedStrategy]] = tuple
    runner: Runner | None = None


class Strategy:
    """One axis of parallelism, or one transformation of the model; each method here does nothing.

    All methods but `apply` are pure: no group, no device, no model.

    Attributes:
        name: the file's name, and that of its options.
        stage: passes are applied in ascending order of stages.
        axes: the axes of the layout that it serves.
        Options: a frozen dataclass; see `plan.options`.
        replaces_parameters: whether other tensors take the places of parameters, so that what refers to the old ones (states
            of optimizers, say) is lost, and a model on the meta device gets its values after the strategy.
        removes_parameters: whether a rank keeps some of the parameters alone.
        divides_steps: whether a rank steps a part of the parameters (or of their rows) alone, so that ranks must agree
            on whether a step is taken.
    """

    name: str
    stage: int
    axes: tuple[str, ...] = ()
    Options: ClassVar[type] = NoOptions
    replaces_parameters: ClassVar[bool] = False
    removes_parameters: ClassVar[bool] = False
    divides_steps: ClassVar[bool] = False

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

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Bytes on one rank, given those that the strategies before this one left."""
        return before

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Transforms the model, in place or by wrapping. Every rank calls it, and it may communicate."""
        return AppliedStrategy(model)


def strategies_of(plan: Plan) -> list[Strategy]:
    """The strategies that a plan uses, resolved or not, whatever the models are."""
    return [strategy for strategy in STRATEGIES if strategy.wanted(plan)]
