"""`Outlook`: what rehearsals of a script tell of candidates that nobody has rehearsed. Pure.

Activations and arithmetic grow in a straight line with the micro-batch, which two rehearsals draw. What the model and its
optimizer take under a plan is arithmetic (`estimate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.base.errors import PlanError
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft, resolve
from paceline.planner.device import Device
from paceline.planner.estimate import Need, estimate
from paceline.planner.rehearsal import Rehearsal
from paceline.planner.search import Candidate, Forecast
from paceline.world.layout import AXES

_AGAIN = 4 / 3  # arithmetic of a step that computes its forward pass twice


@dataclass(frozen=True)
class Outlook:
    """What is known of a script.

    Attributes:
        plan: the one that was rehearsed.
        need: what the models need; its activations are those of `rows` samples.
        rows: samples of one micro-batch on one rank; None where nobody could count them.
        flops: of one micro-batch.
        slope: bytes of activations that one more sample takes.
        device, world_size: where it is to run, and on how many ranks, all on one node.
    """

    plan: Plan
    need: Need
    rows: int | None
    flops: float
    slope: float
    device: Device
    world_size: int

    @classmethod
    def of(cls, seen: Rehearsal, rows: int | None, device: Device, world_size: int) -> Outlook:
        """From one rehearsal: activations are taken as proportional to the samples until a second one is seen."""
        trained = sum(facts.trainable for facts in seen.models)
        activations = seen.memory.largest["activations"] if seen.memory is not None else 0
        held = max(1, seen.plan.layout.size("shard", "tp", "pp")) * seen.optimizer
        states = round(held / (4 * trained)) if seen.memory is not None and trained else 2.0
        flops = seen.traffic.flops / max(1, seen.plan.accumulate)
        slope = activations / rows if rows else 0.0
        return cls(seen.plan, Need(seen.models, activations, states), rows, flops, slope, device, world_size)

    def with_second(self, seen: Rehearsal, rows: int) -> Outlook:
        """With what another micro-batch took."""
        if seen.memory is None or self.rows is None or rows == self.rows:
            return self
        more = seen.memory.largest["activations"] - self.need.activations
        return replace(self, slope=max(0.0, more / (rows - self.rows)))

    def forecast(self, candidate: Candidate, settings: Mapping[str, Any]) -> Forecast:
        """What a candidate takes.

        Args:
            candidate: what is to be tried.
            settings: the same in our settings; what is not among them is as it was rehearsed.
        """
        divides = {"replicate", "shard", "zero"} & set(settings)
        told = {axis: getattr(self.plan.layout, axis) for axis in AXES} | {"mixed_precision": self.plan.precision}
        told |= {name: getattr(self.plan, name) for name in ("accumulate", "recompute", "offload", "compile")}
        if self.plan.zero and not divides:
            told["zero"] = self.plan.zero
        told |= settings
        try:
            notes = [Decision(name, value, "derived", "tuning") for name, value in settings.items()]
            plan = resolve(draft(told, notes, self.world_size, self.plan.options), self.need.models, STRATEGIES)
        except PlanError as error:
            return Forecast(problem=error.problems[0].what)
        extra = (candidate.micro - self.rows) if candidate.micro is not None and self.rows is not None else 0
        activations = max(0, int(self.need.activations + self.slope * extra))
        held = estimate(plan, replace(self.need, activations=activations))
        per_sample = self.flops / self.rows if self.rows else 0.0
        flops = (per_sample * candidate.micro if candidate.micro is not None else self.flops) * candidate.accumulate
        done = flops * (_AGAIN if candidate.recompute != "no" else 1.0)
        compute, near, _ = self.device.seconds(done, held.sent, 0, plan.precision)
        return Forecast(held.held, compute + near, flops)
