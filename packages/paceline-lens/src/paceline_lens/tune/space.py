"""Decides what a tuning may vary: whatever neither the script nor the command line has decided. Pure.

`Tuner` calls `space_of` once, after its first rehearsal of the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.given import Choice
from paceline.planner.estimate import offloads
from paceline_lens.forecast.rehearsal import Rehearsal
from paceline_lens.tune.script_config import ScriptConfig, script_configs
from paceline_lens.tune.search import Candidate, Space, Tuning, batches

OptionSets = tuple[tuple[tuple[str, Any], ...], ...]


def space_of(
    rehearsal: Rehearsal,
    notes: Mapping[str, Any],
    config: ScriptConfig | None,
    tuning: Tuning,
    decisions: Sequence[Choice],
    width: int,
) -> Space:
    """Returns what may be varied, and why the rest may not.

    Args:
        rehearsal: a rehearsal of the script as it is.
        notes: what `ScriptNotes` noted during the rehearsal.
        config: the config that the script hands to its engine, if it has one.
        tuning: the settings of the search.
        decisions: what the command line and files decide.
        width: the number of ranks that read different samples.
    """
    closed: list[Choice] = []
    given = {choice.field: choice for choice in decisions if choice.source != "default"}
    for decision in rehearsal.plan.decisions:
        # What the script's code says is stronger than what the command line does.
        is_news = decision.source == "code" or decision.field not in given
        if decision.source not in ("default", "derived") and is_news:
            given[decision.field] = Choice(**vars(decision))
    zero = _stages(rehearsal, config, given, width, closed)
    recompute = _recompute(rehearsal, config, given, closed)
    offload = _offload(rehearsal, config, given, closed)
    micro = _micro(rehearsal, notes, config, tuning, given, width, closed)
    options: dict[int, OptionSets] = {}
    if not tuning.fast:
        options = {stage: _options(stage, config) for stage in zero}
    return Space(zero, recompute, micro, options, tuple(closed), offload)


def rows_of(notes: Mapping[str, Any]) -> int | None:
    """Returns the samples of a micro-batch on one rank; None if they could not be counted."""
    rows = notes.get("rows")
    return rows if isinstance(rows, int) else None


def settings_of(candidate: Candidate, space: Space, width: int) -> dict[str, Any]:
    """Returns a candidate as settings of Paceline, without those that the script or the command line decides."""
    closed = {choice.field for choice in space.closed}
    settings = candidate.settings(width, divided="zero" not in closed)
    for name in ("recompute", "offload"):
        if name in closed:
            del settings[name]
    if candidate.micro is None:
        del settings["accumulate"]
    return settings


def _stages(
    rehearsal: Rehearsal, config: ScriptConfig | None, given: Mapping[str, Choice], width: int, closed: list[Choice]
) -> tuple[int, ...]:
    """Returns the ZeRO stages to try; adds the reason to `closed` if there is no choice."""
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
    """Returns the values of `recompute` to try; adds the reason to `closed` if there is no choice."""
    choice = given.get("recompute")
    if choice is not None:
        closed.append(Choice("recompute", choice.value, choice.source, choice.where, "it was given"))
        return (str(choice.value),)
    has_blocks = any(facts.blocks for facts in rehearsal.models)
    if config is None and has_blocks:
        return ("no", "blocks")
    reason = "the model has no repeated blocks"
    if config is not None:
        reason = f"no key of {script_configs().called} turns it on"
    closed.append(Choice("recompute", "no", reason=reason))
    return ("no",)


def _offload(
    rehearsal: Rehearsal, config: ScriptConfig | None, given: Mapping[str, Choice], closed: list[Choice]
) -> tuple[str, ...]:
    """Returns the values of `offload` to try; adds the reason to `closed` if there is no choice."""
    choice = given.get("offload")
    word, _, folder = str(choice.value if choice is not None else "auto").partition("=disk:")
    if config is None and word == "auto":
        # Stage 3 takes parameters off the device with the states, whatever is said of these.
        values = offloads(rehearsal.need(rehearsal.whole_states), folder)
        return tuple(value for value in values if value not in ("all", "all+activations"))
    reason = "the script's config says it"
    if config is None and choice is not None:
        closed.append(Choice("offload", choice.value, choice.source, choice.where, "it was given"))
    else:
        closed.append(Choice("offload", rehearsal.plan.offload, reason=reason))
    return (rehearsal.plan.offload,)


def _micro(
    rehearsal: Rehearsal,
    notes: Mapping[str, Any],
    config: ScriptConfig | None,
    tuning: Tuning,
    given: Mapping[str, Choice],
    width: int,
    closed: list[Choice],
) -> tuple[tuple[int | None, int], ...]:
    """Returns the pairs of micro-batch and accumulation to try; adds the reason to `closed` if there is no choice."""
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
        # The batch of all ranks stays what it is, unless the script's config leaves it open.
        total = rows * accumulate * width if config is None else config.fixed_batch()
        pairs = batches(tuning, width, rows, accumulate, total)
        if pairs:
            return tuple(pairs)
        why = "none is within the bounds"
    closed.append(Choice("micro", rows, reason=why))
    return ((None, accumulate),)


def _options(stage: int, config: ScriptConfig | None) -> OptionSets:
    """Returns the sets of options that are worth a trial at a ZeRO stage."""
    if config is not None:
        return config.options(stage)
    if stage == 3:
        # Parameters stay gathered between the forward and the backward pass: fewer messages for more memory.
        return ((("shard.reshard", False),),)
    option = "replicate.bucket_cap_mb" if stage == 0 else "zero.bucket_cap_mb"
    return (((option, 5),), ((option, 100),))
