"""`findings` returns sentences about what is wrong with a run, each with its evidence. `RunView.snapshot` calls it. Pure.

A finding is {kind, level, text, fix, ranks, evidence, stops}:

kind        a stable name, such as "slow-loader"
level       "error", "warning" or "note"
text        one or two sentences
fix         what to do; "" if nothing is known
ranks       the ranks that cause it; [] for all, or none
evidence    the numbers and texts from which the sentence was made, by name
stops       whether the run stands still because of it

The limits are so wide that there are no findings about an even run of a minute on a busy machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paceline_lens.watch.balance import balance
from paceline_lens.watch.finding import LEVELS, RunFinding, duration, milliseconds, size
from paceline_lens.watch.standing import standing

_MEMORY_SHARE = 0.92  # of its memory, from which on a device is nearly full
_GROWTH_BYTES = 256 << 20  # by which memory must have grown
_BELOW_FORECAST = 1.5  # a step takes so many times as long as forecast
_FEWEST_STEPS = 20
# Checkpoints must stop the training for this share of the time, and for so many seconds each.
_STALL_SHARE = 0.05
_STALL_S = 1.0


def findings(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns what is wrong, the worst first.

    Args:
        snapshot: the snapshot of a `RunView`, without findings.
    """
    problems = standing(snapshot)
    # The time of a standstill is part of the times of the phases, which then say nothing about the balance of ranks.
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


def _not_finite(snapshot: Mapping[str, Any]) -> list[RunFinding]:
    """Returns at most three findings about values that are not finite now, those of losses first."""
    problems = []
    for name, (value, since) in snapshot["not_finite"].items():
        level = "warning"
        fix = ""
        if "loss" in name and name != "loss_scale":
            level = "error"
            fix = "a lower learning rate, a clipped gradient norm, or bfloat16 instead of float16"
        text = f"`{name}` has been {value} since step {since:.0f}."
        problems.append(RunFinding("not-finite", level, text, fix, [], {"name": name, "since_step": since}))
    problems.sort(key=lambda problem: LEVELS.index(problem.level))
    return problems[:3]


def _restarts(snapshot: Mapping[str, Any]) -> list[RunFinding]:
    """Returns a finding if the last restarts came at the same step: another restart will not help."""
    steps = snapshot["restart_steps"]
    times = 0
    for step in reversed(steps):
        if step != steps[-1]:
            break
        times += 1
    if times < 2:
        return []
    step = steps[-1]
    text = f"The run has failed {times} times at the same step, {step}: it will probably fail there again."
    fix = "the errors below, and the data of that step; `--max-restarts 0` ends the run at the first failure"
    return [RunFinding("same-step", "error", text, fix, [], {"step": step, "times": times})]


def _checkpoints(snapshot: Mapping[str, Any]) -> list[RunFinding]:
    """Returns findings about a checkpoint that failed, and about checkpoints that stop the training for long."""
    checkpoints = snapshot["checkpoints"]["last"]
    problems = []
    if checkpoints and not checkpoints[-1]["ok"]:
        step = checkpoints[-1]["step"]
        reason = checkpoints[-1]["reason"] or "no reason is known"
        text = f"The last checkpoint, at step {step}, was not written: {reason}"
        problems.append(RunFinding("checkpoint-failed", "error", text, "", [], {"step": step}))
    recent = checkpoints[-10:]
    if len(recent) >= 3:
        # The time begins with the first checkpoint, so that its own stall is not part of it.
        stall_s = sum(event["stall_s"] or 0.0 for event in recent[1:])
        share = stall_s / max(1e-9, recent[-1]["t"] - recent[0]["t"])
        mean_s = stall_s / (len(recent) - 1)
        if share > _STALL_SHARE and mean_s > _STALL_S:
            text = f"Checkpoints stop the training for {duration(mean_s)} each, {share:.0%} of the time."
            fix = "`save_state(background=True)`, or save less often"
            evidence = {"share": round(share, 3), "stall_s": round(mean_s, 2)}
            problems.append(RunFinding("checkpoint-stall", "warning", text, fix, [], evidence))
    return problems


def _memory(snapshot: Mapping[str, Any]) -> list[RunFinding]:
    """Returns findings about memory that is nearly full, and about memory that grows all the time."""
    problems = []
    reporting = [row for row in snapshot["ranks"] if row["memory_peak"] and row["memory_bytes"]]
    full = [row for row in reporting if _memory_share(row) > _MEMORY_SHARE]
    if full:
        worst = max(full, key=_memory_share)
        share = _memory_share(worst)
        text = (
            f"The memory of rank {worst['rank']} is nearly full: it had {size(worst['memory_peak'])} of "
            f"{size(worst['memory_bytes'])} in use ({share:.0%})."
        )
        fix = "smaller batches, `recompute`, or a plan that divides more (`--zero`, `--shard`)"
        numbers = [row["rank"] for row in full]
        problems.append(RunFinding("memory-full", "warning", text, fix, numbers, {"share": round(share, 3)}))
    grows = [row for row in snapshot["ranks"] if row["memory_growth"]]
    grows = [row for row in grows if row["memory_growth"]["bytes"] > _GROWTH_BYTES]
    if grows:
        worst = max(grows, key=lambda row: row["memory_growth"]["bytes"])
        growth = worst["memory_growth"]
        text = (
            f"The memory of rank {worst['rank']} has grown by {size(growth['bytes'])} since step {growth['since_step']}, and "
            "has never become less."
        )
        fix = "something keeps tensors of every step, such as a list of losses: append `loss.item()` or `loss.detach()`"
        problems.append(RunFinding("memory-grows", "warning", text, fix, [row["rank"] for row in grows], dict(growth)))
    return problems


def _memory_share(row: Mapping[str, Any]) -> float:
    return float(row["memory_peak"] / row["memory_bytes"])


def _below_forecast(snapshot: Mapping[str, Any], explained: bool) -> list[RunFinding]:
    """Returns a finding if the run is far slower than its plan forecast, and no other finding explains that."""
    recent = snapshot["speed"]["recent"]["step_ms"]
    forecast = snapshot["speed"]["forecast"]["step_ms"]
    if explained or recent is None or forecast is None:
        return []
    steps = min((row["steps"] for row in snapshot["ranks"]), default=0)
    if steps < _FEWEST_STEPS or recent < _BELOW_FORECAST * forecast:
        return []
    text = (
        f"A step takes {milliseconds(recent)}, {recent / forecast:.1f} times what the plan's forecast said "
        f"({milliseconds(forecast)})."
    )
    fix = "the table of phases shows where the time goes; another program may use the device or the cores"
    return [RunFinding("below-forecast", "note", text, fix, [], {"step_ms": recent, "forecast_ms": forecast})]
