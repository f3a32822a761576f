"""What a tuning may vary: whatever neither the script nor the command line has said. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.given import Choice
from paceline.planner.rehearsal import Rehearsal
from paceline.planner.script_config import ScriptConfig, script_configs
from paceline.planner.search import Candidate, Space, Tuning, batches

OptionSets = tuple[tuple[tuple[str, Any], ...], ...]


def space_of(
    rehearsal: Rehearsal,
    notes: Mapping[str, Any],
    config: ScriptConfig | None,
    tuning: Tuning,
    decisions: Sequence[Choice],
    width: int,
) -> Space:
    """What is open, and why the rest is not.

    Args:
        rehearsal: a rehearsal of the script as it is.
        notes: what was noted in it.
        config: the config that the script hands to its engine, if it has one.
        tuning: how to search.
        decisions: what the command line and files say.
        width: ranks that read different samples.
    """
    closed: list[Choice] = []
    given = {choice.field: choice for choice in decisions if choice.source != "default"}
    for decision in rehearsal.plan.decisions:
        if decision.source not in ("default", "derived"):
            given[decision.field] = Choice(**vars(decision))
    zero = _stages(rehearsal, config, given, width, closed)
    recompute = _recompute(rehearsal, config, given, closed)
    micro = _micro(rehearsal, notes, config, tuning, given, width, closed)
    options: dict[int, OptionSets] = {}
    if not tuning.fast:
        options = {stage: _options(stage, config) for stage in zero}
    return Space(zero, recompute, micro, options, tuple(closed))


def rows_of(notes: Mapping[str, Any]) -> int | None:
    """Samples of a micro-batch on one rank; None where nobody could count them."""
    rows = notes.get("rows")
    return rows if isinstance(rows, int) else None


def settings_of(candidate: Candidate, space: Space, width: int) -> dict[str, Any]:
    """A candidate in our settings; what is closed is left as the script and the command line have it."""
    closed = {choice.field for choice in space.closed}
    settings = candidate.settings(width, divided="zero" not in closed)
    if "recompute" in closed:
        del settings["recompute"]
    if candidate.micro is None:
        del settings["accumulate"]
    return settings


def _stages(
    rehearsal: Rehearsal, config: ScriptConfig | None, given: Mapping[str, Choice], width: int, closed: list[Choice]
) -> tuple[int, ...]:
    for name in ("zero", "shard", "replicate"):
        if config is None and name in given:
            choice = given[name]
            closed.append(Choice("zero", rehearsal.plan.zero, choice.source, choice.where, "it was given"))
            return (rehearsal.plan.zero,)
    stages = (0, 1, 2, 3) if config is None else config.stages()
    if width > 1 or len(stages) == 1:
        return stages
    closed.append(Choice("zero", 0, reason="one rank has nobody to divide with"))
    return (0,)


def _recompute(
    rehearsal: Rehearsal, config: ScriptConfig | None, given: Mapping[str, Choice], closed: list[Choice]
) -> tuple[str, ...]:
    choice = given.get("recompute")
    if choice is not None:
        closed.append(Choice("recompute", choice.value, choice.source, choice.where, "it was given"))
        return (str(choice.value),)
    if config is not None:
        closed.append(Choice("recompute", "no", reason=f"no key of {script_configs().called} turns it on"))
    elif not any(facts.blocks for facts in rehearsal.models):
        closed.append(Choice("recompute", "no", reason="the model has no repeated blocks"))
    else:
        return ("no", "blocks")
    return ("no",)


def _micro(
    rehearsal: Rehearsal,
    notes: Mapping[str, Any],
    config: ScriptConfig | None,
    tuning: Tuning,
    given: Mapping[str, Choice],
    width: int,
    closed: list[Choice],
) -> tuple[tuple[int | None, int], ...]:
    """Pairs of micro-batch and accumulation."""
    rows = rows_of(notes)
    accumulate = rehearsal.plan.accumulate
    accumulate_follows = config is not None or "accumulate" in tuning.arguments
    why = ""
    if config is None and "micro" not in tuning.arguments:
        why = "the script's loader says it; `--arg micro=--FLAG` names an argument that it follows"
    elif rows is None:
        why = "the script comes to no step in a rehearsal, or its samples cannot be counted"
    elif not accumulate_follows and "accumulate" in given:
        why = f"accumulation could not follow: it was given ({given['accumulate'].where})"
    elif not accumulate_follows and not notes["windows"]:
        why = "accumulation could not follow: the loop has no `accelerator.accumulate(model)`"
    else:
        total = rows * accumulate * width if config is None else config.fixed_batch()
        pairs = batches(tuning, width, rows, accumulate, total)
        if pairs:
            return tuple(pairs)
        why = "none is within the bounds"
    closed.append(Choice("micro", rows, reason=why))
    return ((None, accumulate),)


def _options(stage: int, config: ScriptConfig | None) -> OptionSets:
    """Sets of options that are worth a trial."""
    if config is not None:
        return config.options(stage)
    if stage == 3:
        return ((("shard.reshard", False),),)
    option = "replicate.bucket_cap_mb" if stage == 0 else "zero.bucket_cap_mb"
    return (((option, 5),), ((option, 100),))
