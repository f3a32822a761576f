"""Sentences about what is wrong with a run, each with its evidence; pure.

A finding is {kind, level, text, fix, ranks, evidence, stops}:

kind        which one it is, such as "slow-loader"; stable
level       "error", "warning" or "note"
text        one or two sentences
fix         what to do, "" where nothing is known
ranks       those that cause it; [] for all, or none
evidence    name -> number or text: what the sentence was made from
stops       whether the run stands still because of it

The limits are such that an even run of a minute, on a busy machine, says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from paceline.watch.balance import balance
from paceline.watch.finding import LEVELS, Finding, duration, milliseconds, size
from paceline.watch.standing import standing

_MEMORY_SHARE = 0.92
_GROWTH = 256 << 20
_BELOW_FORECAST = 1.5
_FEWEST_STEPS = 20
_STALL_SHARE = 0.05
_STALL_S = 1.0


def findings(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is wrong, the worst first; [] where nothing is.

    Args:
        snapshot: of `RunView`, all but the findings.
    """
    problems = standing(snapshot)
    # What is lost to a standstill is in the times of the phases too.
    if not problems:
        problems += balance(snapshot)
    problems += [
        *_not_finite(snapshot),
        *_restarts(snapshot),
        *_checkpoints(snapshot),
        *_memory(snapshot),
        *_below_forecast(snapshot, explained=bool(problems)),
    ]
    problems.sort(key=lambda problem: (not problem.stops, LEVELS.index(problem.level)))
    return [{**asdict(problem), "evidence": dict(problem.evidence)} for problem in problems]


def _not_finite(snapshot: Mapping[str, Any]) -> list[Finding]:
    """Values that are not finite now; the loss first."""
    problems = []
    for name, (value, since) in snapshot["not_finite"].items():
        level, fix = "warning", ""
        if "loss" in name and name != "loss_scale":
            level, fix = "error", "a lower learning rate, a clipped gradient norm, or bfloat16 instead of float16"
        text = f"`{name}` has been {value} since step {since:.0f}."
        problems.append(Finding("not-finite", level, text, fix, [], {"name": name, "since_step": since}))
    problems.sort(key=lambda problem: LEVELS.index(problem.level))
    return problems[:3]


def _restarts(snapshot: Mapping[str, Any]) -> list[Finding]:
    """The last restarts came at the same step: they will not help."""
    runs = [(step, len(list(same))) for step, same in groupby(snapshot["restart_steps"])]
    if not runs or runs[-1][1] < 2:
        return []
    step, times = runs[-1]
    text = f"The run has failed {times} times at the same step, {step}: it will probably fail there again."
    fix = "the errors below, and the data of that step; `--max-restarts 0` ends the run at the first failure"
    return [Finding("same-step", "error", text, fix, [], {"step": step, "times": times})]


def _checkpoints(snapshot: Mapping[str, Any]) -> list[Finding]:
    last = snapshot["checkpoints"]["last"]
    problems = []
    if last and not last[-1]["ok"]:
        reason = last[-1]["reason"] or "no reason is known"
        text = f"The last checkpoint, at step {last[-1]['step']}, was not written: {reason}"
        problems.append(Finding("checkpoint-failed", "error", text, "", [], {"step": last[-1]["step"]}))
    recent = last[-10:]
    if len(recent) >= 3:
        stall_s = sum(event["stall_s"] or 0.0 for event in recent[1:])
        share = stall_s / max(1e-9, recent[-1]["t"] - recent[0]["t"])
        mean_s = stall_s / (len(recent) - 1)
        if share > _STALL_SHARE and mean_s > _STALL_S:
            text = f"Checkpoints stop the training for {duration(mean_s)} each, {share:.0%} of the time."
            fix = "`save_state(background=True)`, or save less often"
            evidence = {"share": round(share, 3), "stall_s": round(mean_s, 2)}
            problems.append(Finding("checkpoint-stall", "warning", text, fix, [], evidence))
    return problems


def _memory(snapshot: Mapping[str, Any]) -> list[Finding]:
    problems = []
    rows = [row for row in snapshot["ranks"] if row["memory_peak"]]
    full = [row for row in rows if row["memory_bytes"] and row["memory_peak"] > _MEMORY_SHARE * row["memory_bytes"]]
    if full:
        worst = max(full, key=lambda row: row["memory_peak"] / row["memory_bytes"])
        share = worst["memory_peak"] / worst["memory_bytes"]
        text = (
            f"The memory of rank {worst['rank']} is nearly full: it had {size(worst['memory_peak'])} of "
            f"{size(worst['memory_bytes'])} in use ({share:.0%})."
        )
        fix = "smaller batches, `recompute`, or a plan that divides more (`--zero`, `--shard`)"
        numbers = [row["rank"] for row in full]
        problems.append(Finding("memory-full", "warning", text, fix, numbers, {"share": round(share, 3)}))
    grows = [row for row in snapshot["ranks"] if row["memory_growth"] and row["memory_growth"]["bytes"] > _GROWTH]
    if grows:
        worst = max(grows, key=lambda row: row["memory_growth"]["bytes"])
        growth = worst["memory_growth"]
        text = (
            f"The memory of rank {worst['rank']} has grown by {size(growth['bytes'])} since step {growth['since_step']}, and "
            "has never become less."
        )
        fix = "something keeps tensors of every step, such as a list of losses: append `loss.item()` or `loss.detach()`"
        problems.append(Finding("memory-grows", "warning", text, fix, [row["rank"] for row in grows], dict(growth)))
    return problems


def _below_forecast(snapshot: Mapping[str, Any], explained: bool) -> list[Finding]:
    """The run is far slower than its plan said. Where something else has been said already, that is the reason."""
    recent, forecast = snapshot["speed"]["recent"]["step_ms"], snapshot["speed"]["forecast"]["step_ms"]
    steps = min((row["steps"] for row in snapshot["ranks"]), default=0)
    if explained or recent is None or forecast is None or steps < _FEWEST_STEPS or recent < _BELOW_FORECAST * forecast:
        return []
    text = (
        f"A step takes {milliseconds(recent)}, {recent / forecast:.1f} times what the plan's forecast said "
        f"({milliseconds(forecast)})."
    )
    fix = "the table of phases shows where the time goes; another program may use the device or the cores"
    return [Finding("below-forecast", "note", text, fix, [], {"step_ms": recent, "forecast_ms": forecast})]
