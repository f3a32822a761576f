"""`Forecaster`: what rehearsals of a script tell of candidates that nobody has rehearsed. Pure.

Activations and arithmetic grow in a straight line with the micro-batch, which two rehearsals draw. What the model and its
optimizer take under a plan is arithmetic (`estimate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.base.errors import PlanError
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.cost import Bytes
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft, resolve
from paceline.planner.calibration import Calibration
from paceline.planner.device import Device
from paceline.planner.estimate import Need, estimate, settings_of
from paceline.planner.rehearsal import Rehearsal
from paceline.planner.search import Candidate, Forecast
from paceline.planner.step_time import overlaps, step_time
from paceline.planner.work import Work

_RECOMPUTING = 4 / 3  # arithmetic of a step that computes its forward pass twice


@dataclass(frozen=True)
class Forecaster:
    """Predicts candidates of one script.

    Attributes:
        plan: the one that was rehearsed.
        need: what the models need; its activations are those of `rows` samples.
        rows: samples of one micro-batch on one rank; None where nobody could count them.
        flops: of one micro-batch.
        slope: bytes of activations that one more sample takes.
        device, world_size: where it is to run, and on how many ranks, all on one node.
        work: what a rank did in the step that was rehearsed.
        calibration: of the machine; None leaves times to the device's datasheet.
    """

    plan: Plan
    need: Need
    rows: int | None
    flops: float
    slope: float
    device: Device
    world_size: int
    work: Work = field(default_factory=Work)
    calibration: Calibration | None = None

    @classmethod
    def of(
        cls,
        rehearsal: Rehearsal,
        rows: int | None,
        device: Device,
        world_size: int,
        calibration: Calibration | None = None,
    ) -> Forecaster:
        """From one rehearsal: activations are taken as proportional to the samples until a second one is seen."""
        need = Need(rehearsal.models, rehearsal.activations, rehearsal.whole_states)
        flops = rehearsal.traffic.flops / max(1, rehearsal.plan.accumulate)
        slope = rehearsal.activations / rows if rows else 0.0
        work = rehearsal.traffic.work
        return cls(rehearsal.plan, need, rows, flops, slope, device, world_size, work, calibration)

    def with_second(self, rehearsal: Rehearsal, rows: int) -> Forecaster:
        """With what another micro-batch took."""
        if rehearsal.memory is None or self.rows is None or rows == self.rows:
            return self
        more = rehearsal.activations - self.need.activations
        return replace(self, slope=max(0.0, more / (rows - self.rows)))

    def forecast(self, candidate: Candidate, settings: Mapping[str, Any]) -> Forecast:
        """What a candidate takes.

        Args:
            candidate: what is to be tried.
            settings: the same in our settings; what is not among them is as it was rehearsed.
        """
        try:
            plan = self._plan(settings)
        except PlanError as error:
            return Forecast(problem=error.problems[0].what)
        activations: float = self.need.activations
        flops = self.flops
        if candidate.micro is not None:
            rows = self.rows or candidate.micro
            activations += self.slope * (candidate.micro - rows)
            flops = self.flops / rows * candidate.micro
        flops *= candidate.accumulate
        needed = estimate(plan, replace(self.need, activations=max(0, int(activations))))
        computed = flops if candidate.recompute == "no" else flops * _RECOMPUTING
        return Forecast(needed.held, self._seconds(plan, computed, needed), flops)

    def _seconds(self, plan: Plan, computed: float, needed: Bytes) -> float:
        """Of one step that computes so many FLOP and needs these bytes."""
        if self.calibration is None or not self.flops:
            compute, near, _ = self.device.seconds(computed, needed.sent, 0, plan.precision)
            return compute + near
        rehearsed = step_time(self.work, self.calibration)
        growth = computed / (self.flops * max(1, self.plan.accumulate))
        # Larger micro-batches need no more operations; more of them do.
        overhead = rehearsed.overhead_s * plan.accumulate / max(1, self.plan.accumulate)
        computing = growth * rehearsed.compute_s + overhead
        held_then = estimate(self.plan, self.need).optimizer
        optimizer = rehearsed.optimizer_s * (needed.optimizer / held_then if held_then else 1.0)
        link = self.calibration.links.get("send" if plan.zero >= 2 else "allreduce")
        sending = link.seconds(needed.sent) if link is not None else 0.0
        if overlaps(plan):
            sending -= self.calibration.overlap * min(sending, computing)
        return computing + optimizer + sending

    def _plan(self, settings: Mapping[str, Any]) -> Plan:
        """The plan that was rehearsed, with other settings."""
        merged = settings_of(self.plan)
        if {"replicate", "shard", "zero"} & set(settings):
            merged.pop("zero", None)
        merged |= settings
        decisions = [Decision(name, value, "derived", "tuning") for name, value in settings.items()]
        return resolve(draft(merged, decisions, self.world_size, self.plan.options), self.need.models, STRATEGIES)
