"""`predict`: rehearses a run, and searches for its plan where that was left open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from paceline.config.given import Choice
from paceline.config.sources import HANDED, hand_over
from paceline.planner.device import Device
from paceline.planner.estimate import Chosen, Need, Rejected, choose, estimate, gib
from paceline.planner.rehearsal import Rehearsal, Troupe, rehearse
from paceline.planner.report import Report

_TRIES = 4  # rehearsals of one search


def predict(
    work: Callable[[], object],
    troupe: Troupe,
    *,
    device: Device | None = None,
    decisions: Sequence[Choice] = (),
    opened: Sequence[str] = (),
) -> Report:
    """What a run will take.

    Args:
        work: the script, or a function that trains, as one process runs it.
        troupe: how many ranks there are.
        device: what they run on; needed where something is open.
        decisions: what the command line and files say of the run.
        opened: settings that are to be chosen: the cheapest that fit.

    Raises:
        PlanError: those of `rehearse`.
    """
    if not opened or device is None:
        seen = rehearse(work, told(troupe, decisions, {}))
        return _report(seen, troupe, device, None, ())
    fixed = {each.field: each.value for each in decisions if each.field not in opened and each.value != "auto"}
    first = rehearse(work, told(troupe, decisions, _undivided(troupe.world_size, fixed, opened)))
    need = _need(first)
    skip: list[Mapping[str, Any]] = []
    rejected: list[Rejected] = []
    for _ in range(_TRIES):
        chosen = choose(need, troupe.world_size, troupe.local_size, device.usable, fixed, opened, skip)
        rejected += [each for each in chosen.rejected if each not in rejected]
        if chosen.settings is None:
            return _report(first, troupe, device, chosen, tuple(rejected))
        seen = rehearse(work, told(troupe, decisions, chosen.settings))
        if seen.memory is None or seen.memory.total <= device.usable:
            return _report(seen, troupe, device, chosen, tuple(rejected))
        skip.append(chosen.settings)
        needed, there = gib(seen.memory.total), gib(device.usable)
        rejected.append(Rejected(chosen.settings, f"needs {needed} a rank when rehearsed, {there} can be used"))
    return _report(seen, troupe, device, Chosen(None, None, chosen.rejected), tuple(rejected))


def _undivided(world_size: int, fixed: Mapping[str, Any], opened: Sequence[str]) -> dict[str, Any]:
    """Settings of what is open that divide as little as can be: under these the models' needs are seen."""
    width = world_size // prod(int(fixed.get(axis, 1)) for axis in ("tp", "cp", "pp"))
    shard = int(fixed.get("shard", 1 if "replicate" in opened else width // int(fixed.get("replicate", 1))))
    plain = {"replicate": width // shard, "shard": shard, "zero": 3 if shard > 1 else 0}
    return {name: {**plain, "tp": 1, "pp": 1, "recompute": "no"}[name] for name in opened}


def told(troupe: Troupe, decisions: Sequence[Choice], settings: Mapping[str, Any]) -> Troupe:
    """The troupe with settings handed to it as a launcher does, those of a search in the place of what was open."""
    kept = [each for each in decisions if each.field not in settings]
    chosen = [Choice(name, value, "command line", "the planner") for name, value in settings.items()]
    return replace(troupe, settings={**troupe.settings, HANDED: hand_over([*kept, *chosen])})


def _need(seen: Rehearsal) -> Need:
    trained = sum(facts.trainable for facts in seen.models)
    activations = seen.memory.largest["activations"] if seen.memory is not None else 0
    states = seen.optimizer / (4 * trained) if seen.memory is not None and trained else 2.0
    return Need(seen.models, activations, states)


def _report(
    seen: Rehearsal, troupe: Troupe, device: Device | None, chosen: Chosen | None, rejected: tuple[Rejected, ...]
) -> Report:
    by_formula = estimate(seen.plan, _need(seen)) if seen.memory is None else None
    report = Report(seen.plan, troupe.world_size, seen, by_formula, device, chosen, rejected)
    if device is None or report.fits or chosen is not None:
        return report
    # Activations were seen under this plan, which may divide them: an upper bound of what others need is not known.
    need = replace(_need(seen), states=_states(seen))
    return replace(report, instead=choose(need, troupe.world_size, troupe.local_size, device.usable))


def _states(seen: Rehearsal) -> float:
    """Float32 values of optimizer state for each trained parameter, whatever share of them this rank holds."""
    trained = sum(facts.trainable for facts in seen.models)
    held = max(1, seen.plan.layout.size("shard", "tp", "pp")) * seen.optimizer
    return round(held / (4 * trained)) if trained else 2.0
