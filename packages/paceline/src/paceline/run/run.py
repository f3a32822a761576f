"""`Run`: the state of one run. Every part of the facade is constructed with this one object.

world, device, collectives, settings    this process, its device, its communication, and the user's settings
runtime                                 what a run takes from its surroundings
plan, mesh, data_ranks                  the plan and its process groups; a draft until `prepare` has seen a model
events                                  typed hooks: parts of the facade subscribe to what happens in the run
lifetime                                what is to be done as the run ends
gradients, scaler, active_loaders       the owners of gradient scale, of loss scale, and of the loops that are running
prepared                                the models, optimizers, loaders and schedulers that were prepared
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.config import RunSettings
from paceline.config.settings import PRECISIONS
from paceline.data.active import ActiveLoaders
from paceline.data.seed import follow
from paceline.optim.accumulate import Accumulation
from paceline.optim.optimizer import PreparedOptimizer
from paceline.parallel.strategy import strategies_of
from paceline.plan.plan import Decision, Plan
from paceline.planner.exhausted import Situation, explain_exhaustion
from paceline.precision.policy import Precision
from paceline.run.prepared import Prepared
from paceline.world.collectives import Collectives
from paceline.world.events import Events
from paceline.world.lifetime import Lifetime
from paceline.world.mesh import mesh_of
from paceline.world.runtime import Runtime
from paceline.world.world import World

if TYPE_CHECKING:
    from paceline.precision.scaler import LossScaler


class FollowedPhases(Protocol):
    """What follows the phases of a step, such as those of `paceline_lens.observe`."""

    def follow_model(self, model: nn.Module) -> None: ...

    def reduce(self) -> None: ...


class Run:
    """The state of one run, which all parts of the facade share.

    Args:
        world, device, collectives: of this process, whose process group is initialized.
        settings: the user's settings.
        decisions: the source of each setting.
        plan: the draft of the plan.
        runtime: what the run takes from its surroundings; another one in a rehearsal or a trial.
        scaler: options of the loss scaler, or None.
        project_dir: the folder in which the run writes, or None.

    Attributes:
        data_ranks: collectives of the ranks that read different samples.
        scaler: the loss scaler; None if the precision needs none.
        admits: decides at the end of a window whether an optimizer may step; None if every optimizer may.
        phases: what follows the phases of a step, such as forward and backward; None if nothing does.

    Ranks: all must construct it, since it creates the process groups of the plan.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        collectives: Collectives,
        settings: RunSettings,
        decisions: Sequence[Decision],
        plan: Plan,
        runtime: Runtime,
        scaler: Mapping[str, Any] | None = None,
        project_dir: str | None = None,
    ) -> None:
        self.world = world
        self.device = device
        self.collectives = collectives
        self.settings = settings
        self.decisions = decisions
        self.project_dir = project_dir
        self.runtime = runtime
        self.events = Events()
        self.lifetime: Lifetime[[]] = Lifetime()
        self.prepared = Prepared()
        self.active_loaders = ActiveLoaders(self.events, runtime)
        self.gradients = Accumulation(
            plan.accumulate,
            plan.layout.width,
            self.active_loaders,
            collectives,
            self.prepared.held_gradients,
            self.prepared.took_part,
            self.prepared.parameters,
            self.prepared.finish_reduction,
            plan.semantics,
        )
        precision: Precision = PRECISIONS.get(plan.precision)
        self.precision = precision.under(plan.options.get(plan.precision, {}))
        loss_scaler: LossScaler | None = None
        # Options are checked under every precision: a misspelt one must not wait for the first run in fp16.
        if self.precision.scales or scaler:
            from paceline.precision.scaler import LossScaler  # fp16 alone needs it

            loss_scaler = LossScaler(
                device,
                collectives,
                self.is_divided,
                self.prepared.named_parameters,
                self.prepared.held_gradients,
                self.gradients.older,
                **(scaler or {}),
            )
        self.scaler = loss_scaler if self.precision.scales else None
        self.admits: Callable[[PreparedOptimizer], bool] | None = None
        self.phases: FollowedPhases | None = None
        self._has_stepped = False
        # Creates process groups, so that all ranks must get here.
        self.lay_out(plan)
        remember(self)
        _watch_optimizers()
        runtime.begin(self)

    @property
    def logging_dir(self) -> str:
        """The folder in which trackers write: `project_dir`, or `runs` if that is a URL, to which nothing can be appended."""
        folder = (self.project_dir or "runs").removeprefix("file://")
        return "runs" if "://" in folder else folder

    # -- the plan ----------------------------------------------------------------------------------------------

    def lay_out(self, plan: Plan) -> None:
        """Adopts a plan and creates its process groups. Ranks: all."""
        self.plan = plan
        self.mesh = mesh_of(plan.layout, self.world, self.device.type)
        # Ranks along tp, cp and pp read the same samples; only the other axes divide a batch.
        self.data_ranks = self.collectives.over(self.mesh.data_group)
        self.gradients.over(plan.layout.width, self.data_ranks)
        follow(plan.layout)

    def resolve(self, plan: Plan) -> None:
        """Adopts the plan that was resolved for the models of a `prepare`; its layout is that of the current plan."""
        assert plan.layout == self.plan.layout
        self.plan = plan

    def note(self, decision: Decision) -> None:
        """Adds a decision that was made after the plan was resolved."""
        if decision not in self.plan.decisions:
            self.plan = replace(self.plan, decisions=(*self.plan.decisions, decision))

    def admit_by(self, judge: Callable[[PreparedOptimizer], bool]) -> None:
        """Sets the function that decides at the end of a window whether an optimizer may step.

        Only optimizers that are prepared after this call ask it.
        """
        self.admits = judge

    def is_divided(self) -> bool:
        """Returns whether ranks hold gradients of different parameters, or of different parts of them."""
        return any(strategy.divides_steps for strategy in strategies_of(self.plan))

    def follow_phases(self, phases: FollowedPhases, contexts: Mapping[str, AbstractContextManager[None]]) -> None:
        """Lets the phases of a step be followed from now on.

        Args:
            phases: what follows them.
            contexts: for the name of each phase, a context that is open while it runs.
        """
        self.phases = phases
        self.events.phase.subscribe(contexts)

    # -- what surrounds passes and steps -------------------------------------------------------------------------

    def take_step(self, step: Callable[[], Any]) -> Any:
        """Takes a step of a prepared optimizer, and returns what it returns."""
        if not self._has_stepped:
            self._has_stepped = True
            self.events.before_first_step()
        try:
            with self.events.phase["step"]:
                return step()
        except BaseException as error:
            self.explain_exhaustion("step", error)
            raise

    def explain_exhaustion(self, where: str, error: BaseException) -> None:
        """Raises another error for one of an allocator: with what the plan needs, and what could be changed.

        Args:
            where: "forward", "backward" or "step".
            error: that was caught there; the caller raises it again, if it is another one.
        """
        explain_exhaustion(error, where, self.situation)

    def situation(self) -> Situation:
        """Returns the plan, its models, whether the device is the host, the number of ranks, and of those on this node."""
        facts = tuple(model.facts for model in self.prepared.models)
        return self.plan, facts, not self.runtime.accelerated(self.device), self.world.size, self.world.local_size


# Two things here belong to the process and not to a run. torch has one list of step hooks for all optimizers, including
# those that were never prepared. And functions of other libraries' interfaces are called without a run, and must find it.
_live_runs: list[weakref.ref[Run]] = []


def remember(run: Run) -> None:
    """Adds a run to those that `live_runs` returns for as long as they are referenced."""
    # Not by a callback of the reference: Python 3.11 may collect garbage while it copies a list, and a callback that shortens
    # the list then lets it read freed memory (a crash, or an object of any other kind in the copy).
    _live_runs[:] = [reference for reference in _live_runs if reference() is not None]
    _live_runs.append(weakref.ref(run))


def live_runs() -> list[Run]:
    """Returns the runs of this process that are still referenced."""
    runs = []
    for reference in _live_runs:
        run = reference()
        if run is not None:
            runs.append(run)
    return runs


def is_in_loop_of_another(run: Run) -> bool:
    """Returns whether a loader is being iterated that another `Accelerator` of this process has prepared."""
    return any(other is not run and other.active_loaders.top is not None for other in live_runs())


def steps_prepared_model(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer steps a model that any `Accelerator` of this process has prepared."""
    return any(run.prepared.is_stepped_by(optimizer) for run in live_runs())


@cache
def _watch_optimizers() -> None:
    """Registers one hook for the steps of all optimizers, once in a process.

    The hook is never removed. A hook that were removed when its run is collected would change torch's list of hooks, perhaps
    while a step iterates over it.
    """

    def before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        for reference in tuple(_live_runs):
            run = reference()
            if run is not None:
                run.events.before_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
