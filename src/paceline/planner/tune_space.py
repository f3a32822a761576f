"""What a tuning may vary: whatever neither the script nor the command line has said. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.given import Choice
from paceline.planner.rehearsal import Rehearsal
from paceline.planner.script_config import ScriptConfig
from paceline.planner.search import Candidate, Space, Tuning, batches


def space_of(
    seen: Rehearsal,
    notes: Mapping[str, Any],
    config: ScriptConfig | None,
    tuning: Tuning,
    decisions: Sequence[Choice],
    width: int,
) -> Space:
    """What is open, and why the rest is not.

    Args:
        seen: a rehearsal of the script as it is.
        notes: what was noted in it.
        config: the config that the script hands to its engine, if it has one.
        tuning: how to search.
        decisions: what the command line and files say.
        width: ranks that read different samples.
    """
    closed: list[Choice] = []
    given: dict[str, Any] = {each.field: each for each in decisions if each.source != "default"}
    given |= {each.field: each for each in seen.plan.decisions if each.source not in ("default", "derived")}
    zero = _stages(seen, config, given, width, closed)
    recompute = _recompute(seen, config, given, closed)
    micro = _micro(seen, notes, config, tuning, given, width, closed)
    options = {} if tuning.fast else {stage: _options(stage, config) for stage in zero}
    return Space(zero, recompute, micro, options, tuple(closed))


def rows_of(notes: Mapping[str, Any]) -> int | None:
    """Samples of a micro-batch on one rank; None where nobody could count them."""
    rows = notes.get("rows")
    return rows if isinstance(rows, int) else None


def settings_of(candidate: Candidate, space: Space, width: int) -> dict[str, Any]:
    """A candidate in our settings; what is closed is left as the script and the command line have it."""
    closed = {each.field for each in space.closed}
    found = candidate.settings(width, divided="zero" not in closed)
    if "recompute" in closed:
        del found["recompute"]
    if candidate.micro is None:
        del found["accumulate"]
    return found


def _stages(
    seen: Rehearsal, config: ScriptConfig | None, given: Mapping[str, Any], width: int, closed: list[Choice]
) -> tuple[int, ...]:
    said = next((given[name] for name in ("zero", "shard", "replicate") if name in given), None)
    if config is None and said is not None:
        closed.append(Choice("zero", seen.plan.zero or 0, said.source, said.where, "it was given"))
        return (seen.plan.zero or 0,)
    stages = (0, 1, 2, 3) if config is None else config.stages()
    if width > 1 or len(stages) == 1:
        return stages
    closed.append(Choice("zero", 0, reason="one rank has nobody to divide with"))
    return (0,)


def _recompute(
    seen: Rehearsal, config: ScriptConfig | None, given: Mapping[str, Any], closed: list[Choice]
) -> tuple[str, ...]:
    said = given.get("recompute")
    if said is not None:
        closed.append(Choice("recompute", said.value, said.source, said.where, "it was given"))
        return (str(said.value),)
    if config is not None:
        closed.append(Choice("recompute", "no", reason="no key of a DeepSpeed config turns it on"))
    elif not any(facts.blocks for facts in seen.models):
        closed.append(Choice("recompute", "no", reason="the model has no repeated blocks"))
    else:
        return ("no", "blocks")
    return ("no",)


def _micro(
    seen: Rehearsal,
    notes: Mapping[str, Any],
    config: ScriptConfig | None,
    tuning: Tuning,
    given: Mapping[str, Any],
    width: int,
    closed: list[Choice],
) -> tuple[tuple[int | None, int], ...]:
    """Pairs of micro-batch and accumulation."""
    rows, accumulate, why = rows_of(notes), seen.plan.accumulate, ""
    if config is None and "micro" not in tuning.arguments:
        why = "the script's loader says it; `--arg micro=--FLAG` names an argument that it follows"
    elif rows is None:
        why = "the script comes to no step in a rehearsal, or its samples cannot be counted"
    elif config is None and "accumulate" not in tuning.arguments and "accumulate" in given:
        why = f"accumulation could not follow: it was given ({given['accumulate'].where})"
    elif config is None and "accumulate" not in tuning.arguments and not notes["windows"]:
        why = "accumulation could not follow: the loop has no `accelerator.accumulate(model)`"
    found: list[tuple[int, int]] = []
    if not why:
        total = int(rows or 1) * accumulate * width if config is None else config.fixed_batch()
        found = batches(tuning, width, int(rows or 1), accumulate, total)
        why = "" if found else "none is within the bounds"
    if why:
        closed.append(Choice("micro", rows, reason=why))
    return tuple(found) or ((None, accumulate),)


def _options(stage: int, config: ScriptConfig | None) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Sets of options that are worth a trial."""
    if config is not None:
        return config.options(stage)
    if stage == 3:
        return ((("shard.reshard", False),),)
    name = "replicate" if stage == 0 else "zero"
    return tuple(((f"{name}.bucket_cap_mb", size),) for size in (5, 100))
