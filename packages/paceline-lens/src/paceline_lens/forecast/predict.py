"""`predict`: rehearses a run, and searches for its plan where that was left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

from paceline.base.errors import PlanError
from paceline.config.given import Choice
from paceline.config.settings import RunSettings, searched_settings
from paceline.planner.estimate import Chosen, Rejected, candidates, choose, estimate, gib, settings_of, shown
from paceline.world.layout import given_axes
from paceline_lens.forecast.calibration import Lookup
from paceline_lens.forecast.device import Device
from paceline_lens.forecast.rehearsal import Rehearsal, SimulatedWorld, rehearse
from paceline_lens.forecast.report import PlanReport
from paceline_lens.own_runs import handed

_TRIES = 4  # rehearsals of one search


def predict(
    work: Callable[[], object],
    simulated: SimulatedWorld,
    *,
    device: Device | None = None,
    decisions: Sequence[Choice] = (),
    opened: Sequence[str] = (),
    lookup: Lookup | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> PlanReport:
    """What a run will take.

    Args:
        work: the script, or a function that trains, as one process runs it.
        simulated: how many ranks there are.
        device: what they run on; needed where something is open.
        decisions: what the command line and files say of the run.
        opened: settings that are to be chosen: the cheapest that fit, or where there is a calibration the fastest of the
            cheapest.
        lookup: the calibration of the machine, for the time of a step.
        progress: is told what is rehearsed next, as a rehearsal of a large model takes a minute.

    Raises:
        PlanError: those of `rehearse`.
    """
    search = _PredictedSearch(work, simulated, decisions, lookup, progress)
    for decision in decisions:
        if decision.field == "offload":
            search.folder = str(decision.value).partition("=disk:")[2]
    if opened and device is not None:
        return search.run(device, opened)
    rehearsal = search.rehearse({}, "the plan")
    report = _report(rehearsal, simulated, device, None, (), lookup)
    if device is None or report.fits:
        return report
    # What the script itself says of its plan is stronger than any flag that could be proposed.
    by_code = [decision.field for decision in rehearsal.plan.decisions if decision.source == "code"]
    free = [name for name in searched_settings() if name not in by_code]
    sizes = {"zero": 0, **settings_of(rehearsal.plan)}
    asked = {name: sizes[name] for name in free}
    search.folder = search.folder or rehearsal.plan.disk_folder
    reason = f"needs {gib(report.peak)} a rank when rehearsed, {gib(device.usable)} can be used"
    search.fixed = {name: sizes[name] for name in by_code if name in searched_settings()}
    try:
        instead = search.run(device, free, [Rejected(asked, reason)])
    except PlanError as error:
        # The plan that was asked for is reported all the same.
        nothing = Chosen(None, None, (Rejected(asked, reason),))
        instead = replace(report, chosen=nothing, rejected=(Rejected({}, error.problems[0].what),))
    return replace(report, instead=instead)


@dataclass
class _PredictedSearch:
    """Looks for the cheapest plan that fits: formulas sort most plans out, and what they let through is rehearsed.

    Attributes:
        work, simulated, decisions, lookup, progress: see `predict`.
        fixed: settings that the script's own code fixes, beside those of `decisions`.
        folder: where states may be on disk, if `offload` is open; "" for nowhere.
    """

    work: Callable[[], object]
    simulated: SimulatedWorld
    decisions: Sequence[Choice]
    lookup: Lookup | None
    progress: Callable[[str], None]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""

    def rehearse(self, settings: Mapping[str, Any], name: str) -> Rehearsal:
        """Rehearses the script under settings that take the place of those that were open."""
        self.progress(f"rehearsing {name} on rank 0 of {self.simulated.world_size}")
        # As a launcher hands them over.
        variables = {**self.simulated.settings, **handed(self.decisions, settings, "the planner")}
        return rehearse(self.work, replace(self.simulated, settings=variables))

    def run(self, device: Device, opened: Sequence[str], known: Sequence[Rejected] = ()) -> PlanReport:
        """Returns the report of the plan that is chosen, or of the last one that was rehearsed if none fits.

        Args:
            device: what the plan must fit into.
            opened: the names of settings to choose.
            known: plans that were rehearsed before, and do not fit.

        Raises:
            PlanError: those of `rehearse`, for the model undivided.
        """
        simulated, lookup = self.simulated, self.lookup
        fixed = dict(self.fixed)
        for decision in self.decisions:
            is_of_run = decision.field in RunSettings.names()
            if is_of_run and decision.field not in opened and decision.value != "auto":
                fixed.setdefault(decision.field, decision.value)
        undivided = _undivided(simulated.world_size, fixed, opened)
        first = self.rehearse(undivided, "the model undivided")
        need = first.need(first.local_states)
        rejected = list(known)
        skip = [plan.settings for plan in known]
        fitting: list[tuple[Chosen, Rehearsal]] = []
        last = first
        usable = device.usable
        beyond: list[int] = []  # what rehearsals saw over what formulas said
        for may_move in (False, True):
            if may_move:
                if fitting or "offload" not in opened:
                    break
                # Of the plans without offload, formulas may have let too many through; what they missed is in others, too.
                closed = {name: value for name, value in fixed.items() if name not in opened}
                skip += candidates(simulated.world_size, simulated.local_size, closed, opened)
                usable -= max(0, min(beyond, default=0))
            for _ in range(_TRIES):
                chosen = choose(
                    need, simulated.world_size, simulated.local_size, usable, fixed, opened, skip, self.folder
                )
                rejected += [plan for plan in chosen.rejected if plan not in rejected]
                if chosen.settings is None or chosen.estimate is None:
                    break
                offload = chosen.settings.get("offload", "no")
                if not may_move and offload != "no":
                    break
                if fitting and offload != (fitting[0][0].settings or {}).get("offload", "no"):
                    break  # plans that move more are for where no other fits
                skip.append(chosen.settings)
                try:
                    rehearsal = self.rehearse(chosen.settings, shown(chosen.settings))
                except PlanError as error:
                    rejected.append(Rejected(chosen.settings, error.problems[0].what))
                    continue
                last = rehearsal
                if rehearsal.memory is not None and rehearsal.memory.total > device.usable:
                    # The formulas said that it fits, and the rehearsal says that it does not: on to the next one.
                    needed = gib(rehearsal.memory.total)
                    reason = f"needs {needed} a rank when rehearsed, {gib(device.usable)} can be used"
                    rejected.append(Rejected(chosen.settings, reason))
                    beyond.append(rehearsal.memory.total - chosen.estimate.held)
                    continue
                fitting.append((chosen, rehearsal))
                if lookup is None or lookup.calibration is None or rehearsal.memory is None:
                    break
        if not fitting:
            if chosen.settings is None:
                last = first
            return _report(last, simulated, device, Chosen(None, None, chosen.rejected), rejected, lookup)
        reports = [_report(rehearsal, simulated, device, chosen, rejected, lookup) for chosen, rehearsal in fitting]
        return _fastest(reports)


def _fastest(reports: Sequence[PlanReport]) -> PlanReport:
    """The report of the plan that takes the least time for a sample; of equal ones, and where no time is known, the first.

    The others become plans that were rejected.
    """

    def seconds_per_sample(report: PlanReport) -> float:
        # Every rank reads batches of the same size, but ranks that divide the model read the same ones.
        return report.time.total_s / report.plan.layout.width if report.time is not None else inf

    best = min(reports, key=seconds_per_sample)
    slower: list[Rejected] = []
    for report in reports:
        if report is best or report.time is None or report.chosen is None or not report.chosen.settings:
            continue
        reason = f"fits, and a step takes {1e3 * report.time.total_s:.1f} ms"
        width, best_width = report.plan.layout.width, best.plan.layout.width
        if width != best_width:
            reason += f", with {width} / {best_width} of the samples"
        slower.append(Rejected(report.chosen.settings, reason))
    return replace(best, rejected=(*best.rejected, *slower))


def _undivided(world_size: int, fixed: Mapping[str, Any], opened: Sequence[str]) -> dict[str, Any]:
    """Settings of what is open that divide as little as can be: under these the models' needs are seen."""
    width = world_size // prod(int(fixed.get(axis, 1)) for axis in given_axes())
    shard = 1 if "replicate" in opened else width // int(fixed.get("replicate", 1))
    shard = int(fixed.get("shard", shard))
    settings = {"replicate": width // shard, "shard": shard, "zero": 3, "recompute": "no", "offload": "no"}
    settings |= dict.fromkeys(given_axes(), 1)
    if shard == 1:
        settings["zero"] = 0
    return {name: settings[name] for name in opened}


def _report(
    rehearsal: Rehearsal,
    simulated: SimulatedWorld,
    device: Device | None,
    chosen: Chosen | None,
    rejected: Sequence[Rejected],
    lookup: Lookup | None,
) -> PlanReport:
    need = rehearsal.need(rehearsal.local_states)
    by_formula = estimate(rehearsal.plan, need) if rehearsal.memory is None else None
    return PlanReport(
        rehearsal.plan, simulated.world_size, rehearsal, by_formula, device, chosen, tuple(rejected), lookup=lookup
    )
