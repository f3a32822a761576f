"""`Forecaster` predicts the memory and time of candidates of `paceline tune` from one or two rehearsals of the script. Pure.

Activations grow linearly with the micro-batch, and two rehearsals with different micro-batches give the slope. Arithmetic is
proportional to the micro-batch. What the model and its optimizer take under a plan is computed (`estimate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.base.errors import PlanError
from paceline.config.settings import RunSettings
from paceline.parallel.strategy import STRATEGIES
from paceline.plan.cost import Bytes
from paceline.plan.plan import Decision, Plan
from paceline.plan.resolve import draft, resolve
from paceline.planner.estimate import Need, estimate, moving_s, settings_of
from paceline_lens.forecast.calibration import Calibration
from paceline_lens.forecast.device import Device
from paceline_lens.forecast.rehearsal import Rehearsal
from paceline_lens.forecast.step_time import beside_computing, step_time
from paceline_lens.forecast.work import Work
from paceline_lens.tune.search import Candidate, Forecast

# A backward pass computes about twice as much as a forward pass. A step that repeats its forward pass thus computes 4
# parts instead of 3.
_RECOMPUTING = 4 / 3


@dataclass(frozen=True)
class Forecaster:
    """Predicts candidates of one script.

    Attributes:
        plan: the plan that was rehearsed.
        need: what the models need; its activations are those of `rows` samples.
        rows: samples of one micro-batch on one rank; None if they could not be counted.
        flops: floating-point operations of one micro-batch.
        slope: bytes of activations that one more sample takes.
        device: the device of each rank.
        world_size: the number of ranks, all on one node.
        work: what a rank did in the step that was rehearsed.
        calibration: the measurements of the machine; None predicts times at the datasheet's rates of the device.
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
        """Makes a forecaster from one rehearsal. It takes activations to be proportional to the samples."""
        return cls(
            plan=rehearsal.plan,
            need=rehearsal.need(rehearsal.whole_states),
            rows=rows,
            flops=rehearsal.work.flops / max(1, rehearsal.plan.accumulate),
            slope=rehearsal.activations / rows if rows else 0.0,
            device=device,
            world_size=world_size,
            work=rehearsal.work,
            calibration=calibration,
        )

    def with_second(self, rehearsal: Rehearsal, rows: int) -> Forecaster:
        """Returns a forecaster that takes the slope of activations from a second rehearsal, of another micro-batch."""
        if rehearsal.memory is None or self.rows is None or rows == self.rows:
            return self
        more = rehearsal.activations - self.need.activations
        return replace(self, slope=max(0.0, more / (rows - self.rows)))

    def forecast(self, candidate: Candidate, settings: Mapping[str, Any]) -> Forecast:
        """Predicts the memory and time of a candidate.

        Args:
            candidate: the candidate.
            settings: the candidate as settings of Paceline; other settings stay as they were rehearsed.
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
        computed = flops
        if candidate.recompute != "no":
            computed *= _RECOMPUTING
        # The forecast counts the arithmetic of the model: what is computed twice is no work that counts in FLOP/s.
        return Forecast(needed.held, self._seconds(plan, computed, needed), flops)

    def _seconds(self, plan: Plan, computed: float, needed: Bytes) -> float:
        """Returns the seconds of one step that computes `computed` FLOP and needs these bytes."""
        if self.calibration is None or not self.flops:
            compute_s, near_s, _ = self.device.seconds(computed, needed.sent, 0, plan)
            return compute_s + near_s + moving_s(needed)
        # The times of the rehearsed step are scaled to the candidate.
        rehearsed = step_time(self.work, self.calibration)
        rehearsed_accumulate = max(1, self.plan.accumulate)
        compute_s = rehearsed.compute_s * computed / (self.flops * rehearsed_accumulate)
        # The number of operations grows with the number of micro-batches, and not with their size.
        overhead_s = rehearsed.overhead_s * plan.accumulate / rehearsed_accumulate
        computing_s = compute_s + overhead_s
        optimizer_s = rehearsed.optimizer_s
        rehearsed_states = estimate(self.plan, self.need).optimizer
        if rehearsed_states:
            # States that are elsewhere are stepped, too.
            optimizer_s *= estimate(replace(plan, offload="no"), self.need).optimizer / rehearsed_states
        link = self.calibration.links.get("send" if plan.zero >= 2 else "allreduce")
        sending_s = 0.0
        if link is not None:
            sending_s = link.seconds(needed.sent)
        if beside_computing(plan, self.calibration) is not None:
            sending_s -= self.calibration.overlap * min(sending_s, computing_s)
        return computing_s + optimizer_s + sending_s + moving_s(needed)

    def _plan(self, settings: Mapping[str, Any]) -> Plan:
        """Returns the plan that was rehearsed, with other settings."""
        merged = settings_of(self.plan)
        # The stage that was rehearsed may not fit another layout.
        if {"replicate", "shard", "zero"} & set(settings):
            merged.pop("zero", None)
        merged |= settings
        decisions = [Decision(name, value, "derived", "tuning") for name, value in settings.items()]
        settings_of_plan = RunSettings.of({**merged, "options": self.plan.options})
        plan = draft(settings_of_plan, decisions, self.world_size, self.plan.semantics)
        return resolve(plan, self.need.models, STRATEGIES)
