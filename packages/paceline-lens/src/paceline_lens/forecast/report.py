"""What `paceline plan` says: the plan, bytes on a rank, traffic and a step's least time, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from paceline.parallel.strategy import timetable_of
from paceline.plan.cost import Bytes
from paceline.plan.plan import Plan
from paceline.planner.estimate import Chosen, Rejected, elsewhere, estimate, gib, shown
from paceline.world.layout import model_axes
from paceline_lens.forecast.allocation_trace import KINDS
from paceline_lens.forecast.calibration import Calibration, Lookup
from paceline_lens.forecast.datasheet import FAST, SLOW, calibration_of
from paceline_lens.forecast.device import Device
from paceline_lens.forecast.rehearsal import Rehearsal
from paceline_lens.forecast.step_time import StepTime, beside_computing, step_time

_WORDS = {
    "communication": "communication (and gathered parts)",
    "other": "other (the optimizer's temporaries)",
    "buffers": "communication (and gathered parts)",
}
_NOTHING = "nothing that was tried fits: use more processes, a smaller batch, or a larger device"


@dataclass(frozen=True)
class PlanReport:
    """All that is known of a run before it.

    Attributes:
        plan: resolved.
        world_size: ranks.
        rehearsal: what a rehearsal saw; its `memory` is None where it did not come to a step.
        estimate: bytes by arithmetic alone, where the rehearsal did not.
        device: what the run is for; None where nobody said.
        chosen: what a search chose; None where nothing was left open.
        rejected: plans that the search left aside, in its order.
        instead: the report of the cheapest plan that fits, where this one does not. Its `chosen.settings` are None if no plan
            fits.
        lookup: the calibration of this machine or why there is none; None where the plan is for another machine.
    """

    plan: Plan
    world_size: int
    rehearsal: Rehearsal
    estimate: Bytes | None = None
    device: Device | None = None
    chosen: Chosen | None = None
    rejected: tuple[Rejected, ...] = ()
    instead: PlanReport | None = None
    lookup: Lookup | None = None

    @property
    def time(self) -> StepTime | None:
        """How long a step takes on this machine; None where that is not known."""
        if self.lookup is None or self.lookup.calibration is None or self.rehearsal.memory is None:
            return None
        return self._time_by(self.lookup.calibration)

    def range_s(self) -> tuple[float, float]:
        """Returns the least and the most seconds that a step is expected to take on the device; see `datasheet`."""
        assert self.device is not None
        fast = self._time_by(calibration_of(self.device, FAST, self.plan))
        slow = self._time_by(calibration_of(self.device, SLOW, self.plan))
        return fast.total_s, slow.total_s

    def tokens_a_second(self, step_s: float) -> float:
        """Returns the tokens that each rank trains in a second; ranks that divide the model or the sequences share them.

        0 without tokens.
        """
        return self.rehearsal.work.tokens / step_s / self.plan.layout.size(*model_axes())

    def _time_by(self, calibration: Calibration) -> StepTime:
        timetable = timetable_of(self.plan, self.rehearsal.models)
        beside = beside_computing(self.plan, calibration)
        return step_time(self.rehearsal.work, calibration, beside, timetable, max(1, self.plan.accumulate))

    @property
    def peak(self) -> int:
        """Bytes on rank 0 at the peak of a step."""
        memory = self.rehearsal.memory
        if memory is not None:
            return memory.total
        return self.estimate.held if self.estimate is not None else 0

    @property
    def needed(self) -> Bytes:
        """Bytes by arithmetic, of which those that wait elsewhere are in no rehearsal."""
        return estimate(self.plan, self.rehearsal.need(self.rehearsal.local_states))

    @property
    def fits(self) -> bool:
        """Whether the peak is within what the device has to give."""
        return self.device is None or self.peak <= self.device.usable

    def text(self) -> str:
        """Returns the report as text for people."""
        return "\n".join([self.plan.explain(), "", *self._search(), *self._bytes(), "", *self._step()]).rstrip()

    def _search(self) -> Iterator[str]:
        if self.chosen is None:
            return
        yield "search, cheapest first"
        for plan in self.rejected:
            yield f"  no   {plan}"
        if self.chosen.settings is None:
            yield f"  {_NOTHING}"
        else:
            yield f"  yes  {shown(self.chosen.settings)}"
        yield ""

    def _bytes(self) -> Iterator[str]:
        memory = self.rehearsal.memory
        heading = f"memory of rank 0, the first of {self.world_size} processes"
        if memory is None:
            heading += ", by formulas alone"
        yield heading
        if memory is not None:
            yield f"  {'':36}{'at the peak':>12}{'at most':>12}"
            for kind in KINDS:
                if memory.largest[kind]:
                    yield self._line(kind, memory.at_peak[kind], memory.largest[kind])
        elif self.estimate is not None:
            yield f"  the script could not be rehearsed up to a step: {self.rehearsal.problem}"
            yield "  so its activations are not known"
            for kind, count in self.estimate.parts.items():
                if count:
                    yield self._line(kind, count)
        yield f"  {'peak':36}{gib(self.peak):>12}" + self._verdict()
        if memory is not None and self.device is not None:
            yield f"  {'taken by the allocator':36}{gib(memory.reserved):>12}  with the gaps between tensors"
        yield from (f"  {line}" for line in elsewhere(self.needed))
        if not self.fits and self.instead is not None:
            yield from self._proposal(self.instead)

    def _proposal(self, other: PlanReport) -> Iterator[str]:
        settings = other.chosen.settings if other.chosen is not None else None
        if settings is not None:
            how = "rehearsed" if other.rehearsal.memory is not None else "by formulas alone"
            # A value of a file or a variable would stay, unless a flag says otherwise.
            named = [decision.field for decision in self.plan.decisions if decision.source in ("file", "environment")]
            yield f"  fits instead: {shown(settings, named)}  ({gib(other.peak)}, {how})"
            yield from (f"    {line}" for line in elsewhere(other.needed))
            return
        yield f"  {_NOTHING}; what was tried last:"
        yield from (f"    {plan}" for plan in other.rejected[-3:])

    def _line(self, kind: str, *counts: int) -> str:
        return f"  {_WORDS.get(kind, kind):36}" + "".join(f"{gib(count):>12}" for count in counts)

    def _verdict(self) -> str:
        if self.device is None:
            return ""
        there = f"{gib(self.device.memory)} of {self.device.name}, {gib(self.device.usable)} of them usable"
        return f"  {'fits in' if self.fits else 'DOES NOT FIT in'} the {there}"

    def _step(self) -> Iterator[str]:
        work = self.rehearsal.work
        if self.rehearsal.memory is None:
            return
        yield f"one step of rank 0: {work.flops / 1e12:.3g} TFLOP, {gib(sum(work.sent.values()))} sent"
        for (operation, ranks, wide), count in sorted(work.sent.items(), key=lambda item: -item[1]):
            place = "across nodes" if wide else "on one node"
            # torch's own names of calls on one tensor, such as `reduce_scatter_base`, say no more to a reader.
            operation = operation.removesuffix("_base")
            yield f"  {operation:22} {ranks:5} ranks {place:14} {gib(count):>12}"
        if self.device is not None:
            fast, slow = self.range_s()
            line = f"  estimate for {self.device.name}: {fast:.3g} to {slow:.3g} s a step"
            if work.tokens:
                line += (
                    f", {self.tokens_a_second(slow):.4g} to {self.tokens_a_second(fast):.4g} tokens a second on each"
                )
            yield line
            yield f"    at {SLOW.products:.0%} to {FAST.products:.0%} of the datasheet's FLOP/s in products of matrices"
        yield from self._forecast()

    def _forecast(self) -> Iterator[str]:
        """The time of a step on this machine, term by term with its source."""
        if self.lookup is None:
            return
        time = self.time
        calibration = self.lookup.calibration
        if time is None or calibration is None:
            yield f"  no forecast of its time on this machine: {self.lookup.reason}"
            return
        yield f"  forecast for this machine: {1e3 * time.total_s:.1f} ms a step, by {self.lookup.reason}"
        yield from term_lines(time, calibration)

    def json(self) -> dict[str, Any]:
        """Returns the report as JSON values for tools."""
        memory = self.rehearsal.memory
        work = self.rehearsal.work
        sent = []
        for (operation, ranks, wide), count in work.sent.items():
            sent.append({"operation": operation, "ranks": ranks, "across_nodes": wide, "bytes": count})
        content: dict[str, Any] = {
            "layout": self.plan.layout.sizes(),
            "strategies": list(self.plan.strategies),
            "precision": self.plan.precision,
            "decisions": [asdict(decision) for decision in self.plan.decisions],
            "world_size": self.world_size,
            "rehearsed": memory is not None,
            "problem": self.rehearsal.problem,
            "peak": self.peak,
            "at_peak": None,
            "largest": None,
            "reserved": None,
            "estimate": None,
            "flops": work.flops,
            "sent": sent,
            "fits": self.fits,
        }
        if memory is not None:
            content["at_peak"] = memory.at_peak
            content["largest"] = memory.largest
            content["reserved"] = memory.reserved
        if self.estimate is not None:
            content["estimate"] = vars(self.estimate)
        needed = self.needed
        content["elsewhere"] = {"host": needed.host, "disk": needed.disk}
        if self.device is not None:
            content["device"] = asdict(self.device)
            content["seconds_by_datasheet"] = self.range_s()
        if self.chosen is not None:
            content["chosen"] = self.chosen.settings
            content["rejected"] = [
                {"settings": dict(decision.settings), "reason": decision.reason} for decision in self.rejected
            ]
        if self.instead is not None:
            content["instead"] = None if self.instead.chosen is None else self.instead.chosen.settings
        if self.lookup is not None:
            time = self.time
            content["calibration"] = self.lookup.reason
            content["step_seconds"] = None if time is None else time.total_s
            content["step_terms"] = None if time is None else asdict(time)
        return content


def term_lines(time: StepTime, calibration: Calibration) -> Iterator[str]:
    """The terms of a forecast with their sources, and what makes it doubtful."""
    for name, seconds, source in time.terms(calibration):
        yield f"    {name:16}{1e3 * seconds:>10.1f} ms  {source}"
    if calibration.doubt:
        yield f"    {calibration.doubt}"
    if time.unknown:
        yield f"    not counted, as their cost was not measured: {', '.join(time.unknown)}"
