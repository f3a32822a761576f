"""`Strategy`, one axis of parallelism or one transformation of models, and `AppliedStrategy`, what it did to one of them.

    stage   strategy     axis       what it does
    5       quantised               keeps frozen weights of few bits whole
    10      pipeline     pp         keeps this rank's blocks
    15      fp8                     lets linear layers multiply in float8
    20      tensor       tp         divides the matrices of layers
    25      experts      ep         divides the experts of a Mixture of Experts
    30      context      cp         divides sequences
    34      converted_batch_norm    makes batch norms of `nn.SyncBatchNorm` on the CPU
    35      batch_norm              computes batch statistics over all data-parallel ranks
    36      batch_layers            lets other layers see the batch of all data-parallel ranks
    37      balance                 computes the loss that balances experts over the tokens of all ranks
    40      recompute               computes activations again in the backward pass
    50      compile                 compiles the repeated blocks
    60      zero, shard  shard      divides optimizer states, gradients, parameters
    70      offload                 keeps optimizer states in host memory or on disk
    90      replicate    replicate  averages gradients

A `Strategy` has no state: one object serves every plan and every model. All state belongs to the `AppliedStrategy` that its
`apply` returns for one model. The `Chain` of the model (see `parallel.chain`) holds these objects.

A new strategy is one new file with `STRATEGY = Class()`, here or in a package; the registry finds it. Ours are two files: the
declaration, and what it does to a model (`zero.py` and `zero_applied.py`; see `Strategy.applied`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from paceline.base.errors import Problem
from paceline.base.registry import Registry
from paceline.parallel.microbatches import BatchPart
from paceline.parallel.optimizer_adapter import OptimizerAdapter
from paceline.plan.cost import Bytes
from paceline.plan.facts import ModelFacts
from paceline.plan.options import NoOptions, read
from paceline.plan.plan import Decision, Plan
from paceline.world.collectives import Collectives
from paceline.world.events import Events
from paceline.world.layout import AXES, GRADIENT_AXES
from paceline.world.mesh import Mesh
from paceline.world.pending_gradients import PendingGradients
from paceline.world.runtime import Runtime

if TYPE_CHECKING:
    from paceline.plan.timetable import Timetable

STRATEGIES = Registry("paceline.strategies", "strategy")

# What a plan must have for a strategy to be of use: several ranks along one of these axes, or a value of one of these fields
# that is not the default. Most plans use few strategies, and import no others. A strategy that is not listed is always asked.
_OF_USE: dict[str, tuple[str, ...]] = {
    "balance": GRADIENT_AXES,
    "batch_layers": GRADIENT_AXES,
    "batch_norm": tuple(AXES),
    "compile": ("compile",),
    "context": ("cp",),
    "experts": ("ep",),
    "fp8": ("precision",),
    "offload": ("offload",),
    "pipeline": ("pp",),
    "recompute": ("recompute",),
    "replicate": GRADIENT_AXES,
    "shard": ("zero",),
    "tensor": ("tp",),
    "zero": ("zero",),
}

# What some model must have besides: one of these facts. Without it the plan leaves the strategy out.
_TREATS: dict[str, tuple[str, ...]] = {
    "balance": ("balanced", "auxiliary_loss"),
    "batch_layers": ("batch_layers",),
    "batch_norm": ("batch_norms",),
    "converted_batch_norm": ("converted_norms",),
    "quantised": ("quantised",),
}


class AppliedStrategy:
    """The result of one strategy on ONE model, with its state. The methods of this base class do nothing.

    Unless a method says otherwise, all ranks call it together, and it may communicate. The parameters of `module` keep their
    names (FQNs).

    Attributes:
        wrapped: the model after this strategy; the next strategy, or the training loop, gets it.
        module: the module inside of `wrapped`; the same object if the strategy changes the model in place.
        owners: the ranks that hold different parameters of this model from each other, as the stages of a pipeline do; None
            if all ranks hold the same parameters, or shards of the same parameters.
        parameters_on_host: whether parameters stay in host memory while they are not needed.
        joinable: what torch's `Join` needs, if ranks may take different numbers of steps; None otherwise.
    """

    owners: Collectives | None = None
    parameters_on_host: bool = False
    joinable: Joinable | None = None

    def __init__(self, wrapped: nn.Module, module: nn.Module | None = None) -> None:
        self.wrapped = wrapped
        self.module = wrapped if module is None else module

    def bind(self, adapter: OptimizerAdapter) -> list[Decision]:
        """Declares what is done to an optimizer that steps parameters of the model. Called once for each optimizer, after it
        was rebound. No method of the optimizer is replaced here: the adapter does that, once for all strategies.

        Returns:
            The decisions that were made for this optimizer.
        """
        return []

    def hold_gradients(self, alone: bool = False) -> AbstractContextManager[None]:
        """While it is open, backward passes accumulate gradients without communication; see `Reducer.holding`."""
        return nullcontext()

    def leave_to_finish(self, is_left: bool) -> None:
        """Says whether `finish_reduction` follows the backward passes from now on; others finish themselves."""

    def finish_reduction(self) -> None:
        """Called at the end of a window: reduces gradients that were held back, and checks that all were reduced."""

    def call_before_waiting(self, callback: Callable[[], None]) -> None:
        """Registers a function that is called in each backward pass just before it waits for gradients of other ranks."""

    def call_with_others(self, callback: Callable[[], None]) -> None:
        """Registers a function that is called once a forward pass uses other tensors in the place of parameters."""

    def backward_failed(self) -> None:
        """Called after a backward pass of any model of the run raised: resets what that pass has left unfinished.

        It must not wait for other ranks, which may not have failed.
        """

    def full_parameters(self, writeback: bool) -> AbstractContextManager[None]:
        """While it is open, parameters are unsharded plain tensors; `writeback` writes changes back into the shards."""
        return nullcontext()

    def reshard(self) -> None:
        """Frees unsharded parameters that a pass has left gathered. Does not communicate."""

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Adds the entries that only other ranks hold to a state dict of unsharded tensors."""
        return state

    def held_gradients(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Returns parameters with the gradients of an open window that are not in `.grad`; they may be multiplied in place."""
        return ()

    def shards_of(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Returns the parameters that optimizers step, for those that stand in the model in their places at the moment."""
        return parameters

    def took_part(self, changed: set[Tensor]) -> set[Tensor]:
        """Returns the parameters that took part in the last backward pass, if the gradients of `changed` were changed by it.
        Called once after each pass of a window of several micro-batches.

        Gradients may be in a reduction and nowhere else, and a pass may reduce gradients that it has not computed.
        """
        return changed

    def pending_gradients(self) -> PendingGradients:
        """Returns gradients that are not in `.grad`, for a checkpoint in the middle of a window."""
        return PendingGradients()

    def restore_pending(self, pending: PendingGradients) -> None:
        """Replaces what `pending_gradients` returns by that of a checkpoint."""

    def owned_elsewhere(self) -> set[int]:
        """Returns the `id` of each parameter of this rank that another of the `owners` holds, too, and counts in norms."""
        return set()

    def release(self) -> None:
        """Called when the run forgets the model: takes hooks back, so that it can be prepared again."""

    def uneven_steps(self) -> AbstractContextManager[None]:
        """While it is open, ranks may take different numbers of steps. So no forward pass may wait for another rank."""
        return nullcontext()


class Runner(AppliedStrategy, ABC):
    """An applied strategy that runs forward and backward passes together, as a pipeline must.

    Attributes:
        owners: the ranks that hold the stages.
        begins: the numbers of the blocks with which the stages begin.
        first_blocks: the names of these blocks.
    """

    owners: Collectives
    begins: tuple[int, ...]
    first_blocks: tuple[str, ...]

    @abstractmethod
    def forward_backward(self, batch: BatchPart, loss_fn: Callable[..., Tensor], factor: Tensor, mean: bool) -> Tensor:
        """Runs one batch forward and backward; gradients stay on the ranks that hold the parameters.

        Args:
            batch: the model's arguments and the target. Tensors whose dim 0 is the number of rows are split into
                micro-batches; each micro-batch gets everything else as it is.
            loss_fn: called with the output and the target of a micro-batch.
            factor: a factor for the loss of the whole batch, applied before the backward pass.
            mean: whether `loss_fn` returns the mean over rows rather than a sum.

        Returns:
            The loss of the batch, detached.

        Shape: factor []; returns [].

        Ranks: all `owners`, with the same batch; each gets the loss.
        """

    @abstractmethod
    def forward_backward_each(
        self, parts: Sequence[BatchPart], loss_fn: Callable[..., Tensor], factor: Tensor, mean: bool
    ) -> Tensor:
        """Runs micro-batches that the caller has made. Each counts the same, and their shapes may differ.

        Arguments and result are those of `forward_backward`.
        """

    @abstractmethod
    def follow(self, phase: Callable[[str], AbstractContextManager[Any]]) -> None:
        """From now on opens `phase("forward")` and `phase("backward")` around what this rank computes."""


@dataclass(frozen=True)
class Averaging:
    """What a strategy does to gradients between ranks; a row of the table in `docs/concepts/gradient-scale.md`.

    Attributes:
        over: the ranks, by axes.
        when: in which part of a window.
        result: what `.grad` holds then.
    """

    over: str
    when: str
    result: str


@dataclass(frozen=True)
class Context:
    """The objects besides the model that `Strategy.apply` may use.

    Attributes:
        plan: the resolved plan.
        mesh: the device mesh and its process groups.
        collectives: of all ranks.
        device: the device of the model.
        facts: what planning knew of the model.
        options: the options of the strategy, an instance of its `Options`.
        idle: returns whether this rank's current batch holds no sample but only a filler row.
        siblings: returns the applied strategies of all models of the run.
        runner: the runner that an earlier strategy of the chain has made for this model, or None.
        runtime: the surroundings of the run: whether the other ranks answer, and what memory of the CPU stands for.
        events: of the run.
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
    runtime: Runtime = field(default_factory=Runtime)
    events: Events = field(default_factory=Events)


class Strategy:
    """One axis of parallelism, or one transformation of the model. The methods of this base class do nothing.

    All methods except `apply` are pure: they use no process group, no device and no model.

    Attributes:
        name: the name of its file and of its options.
        stage: strategies are applied in ascending order of stages.
        axes: the axes of the layout that it serves.
        Options: a frozen dataclass; see `plan.options`.
        replaces_parameters: whether `apply` replaces parameters by other tensors. Then optimizer states of the old parameters
            are lost, and a model on the meta device is initialized after `apply`.
        removes_parameters: whether each rank keeps only some of the parameters.
        averaging: what it does to gradients between ranks; None if nothing.
        divides_steps: whether each rank steps only some parameters, or only a part of each. Then ranks must agree on whether
            a step is taken.
        applied: the module whose function `apply(model, context)` does what the strategy says; "" if `apply` is overridden.
            Strategies are loaded in order to be asked whether a plan wants them, and to say what it costs. So what works on a
            model is another module, which is loaded when it is applied.
    """

    name: str
    stage: int
    axes: tuple[str, ...] = ()
    Options: ClassVar[type] = NoOptions
    replaces_parameters: ClassVar[bool] = False
    removes_parameters: ClassVar[bool] = False
    divides_steps: ClassVar[bool] = False
    averaging: ClassVar[Averaging | None] = None
    applied: ClassVar[str] = ""

    def wanted(self, plan: Plan) -> bool:
        """Returns whether the plan uses this strategy."""
        return any(getattr(plan.layout, axis) > 1 for axis in self.axes)

    def concerns(self, models: Iterable[ModelFacts]) -> bool:
        """Returns whether the strategy changes any of these models; if not, the plan leaves it out."""
        return _concerns(self.name, models)

    def options(self, plan: Plan) -> Any:
        """Returns the options of this strategy. Invalid values, which `resolve` reports, are replaced by their defaults."""
        return read(self.Options, plan.options.get(self.name, {}), self.name)[0]

    def check(self, plan: Plan, facts: ModelFacts) -> list[Problem]:
        """Returns the problems that keep the strategy from working on a model."""
        return []

    def keeps_apart(self, plan: Plan) -> str:
        """Returns what to change so that two models may share parameters; "" if they may under this plan."""
        if not self.replaces_parameters:
            return ""
        settings = [f"{axis}=1" for axis in self.axes]
        return f"use {' and '.join(settings)}, under which parameters are whole"

    def decide(self, plan: Plan, facts: ModelFacts) -> list[Decision]:
        """Returns the strategy's own choices, each with its reason."""
        return []

    def cost(self, plan: Plan, facts: ModelFacts, before: Bytes) -> Bytes:
        """Returns the bytes on one rank, given the bytes after the strategies before this one."""
        return before

    def timetable(self, plan: Plan, models: Sequence[ModelFacts]) -> Timetable | None:
        """Returns in which order ranks work on the micro-batches of a batch; None if all work on all of it at the same time.

        Args:
            models: those that were prepared.
        """
        return None

    def apply(self, model: nn.Module, context: Context) -> AppliedStrategy:
        """Transforms the model, in place or by wrapping it. Ranks: all; it may communicate."""
        if not self.applied:
            return AppliedStrategy(model)
        outcome: AppliedStrategy = import_module(self.applied).apply(model, context)
        return outcome


def strategies_for(plan: Plan, models: Sequence[ModelFacts] = ()) -> list[Strategy]:
    """Returns the strategies that a plan may use or has options for. Those of which it has no use are not imported.

    Args:
        plan: whose strategies they are.
        models: those that it is for. Without them, strategies that only some models need are left out.
    """
    names = STRATEGIES.names()
    # The error about an option of no strategy lists all strategies.
    if not plan.options.keys() <= set(names):
        return list(STRATEGIES)
    return [STRATEGIES.get(name) for name in names if name in plan.options or _is_of_use(name, plan, models)]


def _concerns(name: str, models: Iterable[ModelFacts]) -> bool:
    """Returns whether some model has what a strategy is for."""
    fields = _TREATS.get(name)
    return fields is None or any(getattr(facts, field) for facts in models for field in fields)


def _is_of_use(name: str, plan: Plan, models: Sequence[ModelFacts]) -> bool:
    """Returns whether a plan may use a strategy, as far as one can say without importing it."""
    if not _concerns(name, models):
        return False
    for needed in _OF_USE.get(name, ()):
        if needed in AXES:
            has_it = getattr(plan.layout, needed) > 1
        else:
            has_it = getattr(plan, needed) != getattr(Plan, needed)
        if has_it:
            return True
    return name not in _OF_USE


def strategies_of(plan: Plan) -> list[Strategy]:
    """Returns the strategies that a plan uses, for a draft of a plan, too."""
    return [strategy for strategy in strategies_for(plan) if strategy.wanted(plan)]


def timetable_of(plan: Plan, models: Sequence[ModelFacts]) -> Timetable | None:
    """Returns the timetable of the plan's pipeline; None if it has none."""
    for strategy in strategies_of(plan):
        timetable = strategy.timetable(plan, models)
        if timetable is not None:
            return timetable
    return None
