"""`Run`: what one run is. Every part of the facade is built from this one object.

world, device, collectives, settings    who this process is, where it computes, whom it talks to, what it was told
plan, mesh, data_ranks                  what was decided; a draft until `prepare` has seen a model
events                                  what happens, for whoever wants to know
gradients, scaler, active_loaders       the owners of gradient scale, loss scale, and the loop that is running
prepared                                the models, optimizers, loaders and schedulers that `prepare` took in
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.config import RunSettings
from paceline.config.settings import PRECISIONS
from paceline.data.active import ActiveLoaders
from paceline.data.seed import follow
from paceline.observe.phases import NAMES, Phases
from paceline.optim.accumulate import Accumulation
from paceline.optim.optimizer import PreparedOptimizer
from paceline.parallel.strategy import strategies_of
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Decision, Plan
from paceline.planner import exhausted
from paceline.precision.policy import Precision
from paceline.precision.scaler import LossScaler
from paceline.prepared import Prepared
from paceline.world.collectives import Collectives
from paceline.world.events import Events
from paceline.world.mesh import Mesh
from paceline.world.world import World


class Run:
    """One run, as its parts see it.

    Args:
        world, device, collectives: of this process; its group is up.
        settings: what the run was told, and `decisions`: where each value comes from.
        plan: the draft.
        scaler: options of the loss scaler, or None.
        project_dir: where the run writes, or None.

    Attributes:
        data_ranks: collectives of the ranks that read different samples.
        scaler: the loss scaler; None where the precision needs none.
        admits: says whether an optimizer may take its step; None: each may.
        phases: which part of a step runs; None where nobody has asked to follow them.

    Ranks: all make one, which makes the groups of the plan.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        collectives: Collectives,
        settings: RunSettings,
        decisions: Sequence[Decision],
        plan: Plan,
        scaler: Mapping[str, Any] | None = None,
        project_dir: str | None = None,
    ) -> None:
        self.world = world
        self.device = device
        self.collectives = collectives
        self.settings = settings
        self.decisions = decisions
        self.project_dir = project_dir
        self.events = Events()
        self.prepared = Prepared()
        self.active_loaders = ActiveLoaders(self.events)
        self.gradients = Accumulation(plan.accumulate, plan.layout.width, self.active_loaders, collectives)
        self.precision: Precision = PRECISIONS.get(plan.precision)
        loss_scaler = None
        # Options are checked under every precision: a misspelt one must not wait for the first run in fp16.
        if self.precision.scales or scaler:
            loss_scaler = LossScaler(
                device, collectives, self._is_divided, self.prepared.named_parameters, **(scaler or {})
            )
        self.scaler = loss_scaler if self.precision.scales else None
        self.admits: Callable[[PreparedOptimizer], bool] | None = None
        self.phases: Phases | None = None
        self._has_stepped = False
        self.lay_out(plan)
        _live_runs.add(self)
        _watch_optimizers()

    # -- the plan ----------------------------------------------------------------------------------------------

    def lay_out(self, plan: Plan) -> None:
        """Takes a plan over and makes its groups; peers along tp, cp and pp read the same samples. Ranks: all."""
        self.plan = plan
        self.mesh = Mesh(plan.layout, self.world, self.device.type)
        self.data_ranks = self.collectives.over(self.mesh.data_group)
        self.gradients.over(plan.layout.width, self.data_ranks)
        follow(plan.layout)

    def resolve(self, plan: Plan) -> None:
        """Takes over the plan that the models of a `prepare` have made of this one; its layout is the same."""
        assert plan.layout == self.plan.layout
        self.plan = plan

    def note(self, decision: Decision) -> None:
        """Adds to the plan what was found out after it was made."""
        if decision not in self.plan.decisions:
            self.plan = replace(self.plan, decisions=(*self.plan.decisions, decision))

    def admit_by(self, judge: Callable[[PreparedOptimizer], bool]) -> None:
        """Has `judge` say, at the end of each window, whether an optimizer may step; those prepared from now on ask it."""
        self.admits = judge

    def _is_divided(self) -> bool:
        """Whether ranks hold gradients of different parameters, or of different parts of them."""
        return any(strategy.divides_steps for strategy in strategies_of(self.plan))

    def follow_phases(self) -> Phases:
        """The phases of a step, which are followed from the first call on."""
        if self.phases is None:
            self.phases = Phases()
            self.events.phase.subscribe({name: self.phases.during(name) for name in NAMES})
        return self.phases

    # -- what runs inside of what --------------------------------------------------------------------------------

    def optimizer_step(self) -> AbstractContextManager[None]:
        """What each step of a prepared optimizer runs inside of."""
        if not self._has_stepped:
            self._has_stepped = True
            self.events.before_first_step()
        return self._measured_step()

    @contextmanager
    def _measured_step(self) -> Iterator[None]:
        with self.explaining_memory("step"), self.events.phase("step"):
            yield

    def explaining_memory(self, where: str) -> AbstractContextManager[None]:
        """While it is open, running out of memory raises an error that says what the plan needs.

        Args:
            where: "forward", "backward" or "step".
        """
        return exhausted.explain_exhaustion(self.situation, where)

    def situation(self) -> tuple[Plan, tuple[ModelFacts, ...], int, int]:
        """What an error about memory tells: the plan, the models, ranks in all and ranks on this node."""
        facts = tuple(model.facts for model in self.prepared.models)
        return self.plan, facts, self.world.size, self.world.local_size


# Two things here belong to the process and not to a run. torch has one list of hooks for the steps of all optimizers,
# those that no run knows included; and other libraries' functions take a parameter or nothing, and must find its run.
_live_runs: weakref.WeakSet[Run] = weakref.WeakSet()


def live_runs() -> list[Run]:
    """The runs of this process that somebody still holds."""
    return list(_live_runs)


@cache
def _watch_optimizers() -> None:
    """Puts one hook there for good: a hook taken away when a run is collected would change torch's list as a step reads it."""

    def before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
        for run in live_runs():
            run.events.before_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
