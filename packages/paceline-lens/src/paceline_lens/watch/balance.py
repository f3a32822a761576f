"""Findings about where the time of the steps goes: a slow rank, a slow loader, communication.

Ranks that train together end their steps together. If one rank takes longer in a phase, the others wait for it for as long,
mostly in "reduce", and under some plans in "forward", "backward" or "step". Time that ranks were seen to wait inside of
collectives counts as "reduce", whichever phase it was in. So the cause is the rank that is above the others in one phase, and
below them in the phases in which ranks wait.

Stages of a pipeline differ. A rank that takes longer both forward and backward either has a larger stage or is slow
altogether, and its times cannot tell which.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_lens.watch.finding import RunFinding, capital, median, milliseconds, named

_FEWEST_STEPS = 5
_SLOW_LOADER = 0.10  # shares of a step by which a rank must be above the others
_SLOW_RANK = 0.15
_COMPENSATED = 0.5  # the share of a rank's additional time that the others must at least wait
_DATA_SHARE = 0.25
# On an accelerator the host loads data while the device computes, so that much of it costs nothing.
_DATA_SHARE_OF_HOST = 0.5
_COMMUNICATION_SHARE = 0.35
_ALIKE = 0.5  # if a stage has more work, the smaller of its excesses forward and backward is at least this part of the larger
_WAITING = ("reduce", "pipeline", "forward", "backward", "step", "clip", "rest")
# Phases in the order of certainty that a rank above the others in them is the cause, and does not wait itself. The host of an
# accelerator waits for its device, and through it for other ranks, whenever it reads a number: in "clip", in "step", or in
# the script. So these phases are the least certain there.
_CAUSES = (("data",), ("rest", "clip"), ("forward",), ("step", "backward"))
_CAUSES_OF_HOST = (("data",), ("forward",), ("backward",), ("rest", "clip", "step"))


_PHASE_NAMES = {"forward": "forward pass", "backward": "backward pass", "step": "optimizer's step"}


@dataclass(frozen=True)
class _Excess:
    """A rank that takes longer than the others.

    Attributes:
        row: the rank's row in the snapshot.
        phase: the phase in which it takes longer.
        ms, others_ms: its milliseconds a step in this phase, and the median of the others.
        share, others_share: the same as shares of their time.
        waits: the share of their time that the others wait more than this rank does.
        certainty: the position in `_CAUSES`; a smaller one is more certain.
        stage: the milliseconds a step of forward and backward passes together, on this rank and on the others, if its stage
            of a pipeline seems to have more work; None otherwise.
    """

    row: Mapping[str, Any]
    phase: str
    ms: float
    others_ms: float
    share: float
    others_share: float
    waits: float
    certainty: int
    stage: tuple[float, float] | None = None


def balance(snapshot: Mapping[str, Any]) -> list[RunFinding]:
    """Returns findings about what took the time of the recent steps."""
    heat = snapshot["heat"]
    table: dict[int, dict[str, float]] = {}  # rank -> phase -> milliseconds in a step
    for row, ms in zip(snapshot["ranks"], heat["ms_per_step"], strict=True):
        if ms is None or row["window_steps"] < _FEWEST_STEPS:
            return []  # the others may be waiting for this rank, of which too little is known
        table[row["rank"]] = dict(zip(heat["phases"], ms, strict=True))
    if not table:
        return []
    causes = _causes(snapshot["ranks"], _without_waits(table, heat["waits_per_step"]))
    problems = [_slow(group, snapshot) for group in _groups(causes)]
    # Findings about all ranks together: the share of each rank's time that goes into data and into communication.
    data = []
    communication = []
    for ms in table.values():
        whole = _whole(ms)
        data.append(ms["data"] / whole)
        communication.append(ms["reduce"] / whole + ms["pipeline"] / whole)
    limit = _DATA_SHARE_OF_HOST if _has_accelerator(snapshot["ranks"][0]) else _DATA_SHARE
    # All ranks must be near the limit: if only some wait for data, `_causes` has found their loaders already.
    if min(data) > 0.8 * limit and median(data) > limit:
        problems.append(_all_wait_for_data(data))
    if len(table) > 1 and min(communication) > _COMMUNICATION_SHARE:
        problems.append(_communication(communication))
    return problems


def _without_waits(
    table: Mapping[int, Mapping[str, float]], waits_per_step: Sequence[Sequence[float]]
) -> dict[int, dict[str, float]]:
    """Returns the table with the waits of all phases moved to "reduce", except for "pipeline", where ranks only wait.

    `waits_per_step` has the same order as the table.
    """
    moved = {}
    for (rank, ms), waits in zip(table.items(), waits_per_step, strict=True):
        own = dict(ms)
        for phase, wait in zip(ms, waits, strict=True):
            if phase != "pipeline":
                own[phase] -= wait
                own["reduce"] += wait
        moved[rank] = own
    return moved


def _causes(rows: Sequence[Mapping[str, Any]], table: Mapping[int, Mapping[str, float]]) -> list[_Excess]:
    """Returns the ranks that the others wait for; if there are several explanations, those of the most certain phase."""
    # One rank has no others to compare it with.
    if len(table) < 2:
        return []
    # From here on all numbers are milliseconds of one step. A rank's excess is judged by the length of a usual step.
    step_ms = median(_whole(ms) for ms in table.values())
    phases = next(iter(table.values()))
    # Sorted once: looking for the median of the others for each rank and phase would be quadratic in the ranks.
    ordered: dict[str, list[float]] = {}
    for phase in phases:
        ordered[phase] = sorted(ms[phase] for ms in table.values())
    excesses = []
    for row in rows:
        excess = _excess(row, table[row["rank"]], ordered, step_ms)
        if excess is not None:
            excesses.append(excess)
    surest = min((excess.certainty for excess in excesses), default=0)
    # Less certain ones may be victims: under a plan that waits in "forward", a rank that waits there is above the others,
    # too. And a rank that is slowed down by something else is above them in several phases.
    return [excess for excess in excesses if excess.certainty == surest]


def _excess(
    row: Mapping[str, Any], own: Mapping[str, float], ordered: Mapping[str, Sequence[float]], step_ms: float
) -> _Excess | None:
    """Returns the most certain phase in which a rank is above the others while they wait for it; None if there is none.

    Args:
        row: the rank's row in the snapshot.
        own: its milliseconds in each phase of a step.
        ordered: phase -> milliseconds of all ranks, in ascending order.
        step_ms: the milliseconds of a whole step.
    """
    # The rank itself is left out of the median: of two ranks, it would be half of it.
    others = {phase: _median_without(ordered[phase], ms) for phase, ms in own.items()}
    causes = _CAUSES_OF_HOST if _has_accelerator(row) else _CAUSES
    for certainty, phases in enumerate(causes):
        phase = max(phases, key=lambda name: own[name] - others[name])
        above = own[phase] - others[phase]
        least = _SLOW_LOADER if phase == "data" else _SLOW_RANK
        # By how much the others wait longer than this rank does.
        waits = sum(max(0.0, others[name] - own[name]) for name in _WAITING if name != phase)
        if above <= least * step_ms or waits <= _COMPENSATED * above:
            continue
        stage: tuple[float, float] | None = None
        if phase in ("forward", "backward"):
            stage = _stage(own, others)
        others_whole = _whole(others)
        return _Excess(
            row,
            phase,
            ms=own[phase],
            others_ms=others[phase],
            share=own[phase] / _whole(own),
            others_share=others[phase] / others_whole,
            waits=waits / others_whole,
            certainty=certainty,
            stage=stage,
        )
    return None


def _stage(own: Mapping[str, float], others: Mapping[str, float]) -> tuple[float, float] | None:
    """Returns the milliseconds of forward and backward passes on this rank and on the others, if its stage has more work.

    Such a stage takes longer both forward and backward, by about the same factor, and the others wait in "pipeline". If only
    one of the passes is slow, for example because of Python code that runs in it, the stage is not larger: then it is None.
    """
    if others["pipeline"] <= own["pipeline"] or not (others["forward"] and others["backward"]):
        return None
    forward = own["forward"] / others["forward"] - 1
    backward = own["backward"] / others["backward"] - 1
    if min(forward, backward) < _ALIKE * max(forward, backward):
        return None
    return own["forward"] + own["backward"], others["forward"] + others["backward"]


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Returns the median of the other values; `ordered` contains `value`, and at least one more."""
    place = bisect_left(ordered, value)
    count = len(ordered) - 1
    # The one or two values in the middle, counted without the value that is left out. The list is not copied: an index from
    # `place` on moves by one instead.
    middle = []
    for index in {(count - 1) // 2, count // 2}:
        if index >= place:
            index += 1
        middle.append(ordered[index])
    return sum(middle) / len(middle)


def _groups(causes: Sequence[_Excess]) -> list[list[_Excess]]:
    """Groups causes by phase, since those in the same phase become one finding."""
    groups: dict[str, list[_Excess]] = {}
    for excess in causes:
        groups.setdefault(excess.phase, []).append(excess)
    return list(groups.values())


def _slow(group: Sequence[_Excess], snapshot: Mapping[str, Any]) -> RunFinding:
    rows = [excess.row for excess in group]
    who = capital(named(rows, snapshot))
    worst = max(group, key=lambda excess: excess.share)
    s, is_, has, its, it = "s", "is", "has", "its", "it"
    if len(group) > 1:
        s, is_, has, its, it = "", "are", "have", "their", "them"
    numbers = [row["rank"] for row in rows]
    # The numbers are those of the worst rank: an average over the group would hide how bad it is.
    evidence: dict[str, float | str] = {
        "phase": worst.phase,
        "share": round(worst.share, 3),
        "others_share": round(worst.others_share, 3),
        "ms": round(worst.ms, 2),
        "others_ms": round(worst.others_ms, 2),
        "waits": round(worst.waits, 3),
    }
    wait = f"The others wait for {it}: {worst.waits:.0%} of their time."
    if worst.stage is not None:
        own_ms, others_ms = worst.stage
        text = (
            f"{who} {has} the longest stage of the pipeline: {its} forward and backward passes take "
            f"{milliseconds(own_ms)} a step, those of the others {milliseconds(others_ms)}. {wait}"
        )
        evidence |= {"stage_ms": round(own_ms, 2), "others_stage_ms": round(others_ms, 2)}
        return RunFinding("long-stage", "note", text, _STAGE_FIX, numbers, evidence)
    if worst.phase == "data":
        text = (
            f"{who} wait{s} {worst.share:.0%} of {its} time for {its} data, the others {worst.others_share:.0%}. {wait}"
        )
        return RunFinding("slow-loader", "warning", text, _LOADER_FIX, numbers, evidence)
    if worst.phase == "rest":
        text = (
            f"{who} spend{s} {worst.share:.0%} of the time outside of the training step (logging, "
            f"evaluation, the script's own code), the others {worst.others_share:.0%}. {wait}"
        )
        return RunFinding("slow-rank", "warning", text, "do it less often, or on all ranks", numbers, evidence)
    phase = _PHASE_NAMES.get(worst.phase, worst.phase)
    factor = ""
    if worst.others_ms:
        times = worst.ms / worst.others_ms
        digits = 0 if times > 10 else 1
        factor = f" ({times:.{digits}f} times as long)"
    text = (
        f"{who} {is_} slow: the {phase} takes {milliseconds(worst.ms)}, that of the others "
        f"{milliseconds(worst.others_ms)}{factor}. {wait}"
    )
    fix = "look for another program on its device or cores, a throttled device, or larger batches: `paceline doctor`"
    return RunFinding("slow-rank", "warning", text, fix, numbers, evidence)


_STAGE_FIX = (
    "if it has more work than the others, divide the model otherwise: the option `split` of the pipeline; if not, look for "
    "another program on its device or cores: `paceline doctor`"
)
_LOADER_FIX = "give its DataLoader more workers (`num_workers`), and look at the disk or network that it reads from"


def _all_wait_for_data(shares: Sequence[float]) -> RunFinding:
    share = median(shares)
    who = "The rank waits" if len(shares) == 1 else f"All {len(shares)} ranks wait"
    text = f"{who} for data: {share:.0%} of the time."
    fix = "give the DataLoader more workers (`num_workers`), or do less work for each sample"
    return RunFinding(
        "data-bound", "warning", text, fix, [], {"share": round(share, 3), "least": round(min(shares), 3)}
    )


def _communication(shares: Sequence[float]) -> RunFinding:
    share = median(shares)
    least = min(shares)
    text = f"Communication that no computing hides takes {share:.0%} of the time of a step, on every rank at least {least:.0%}."
    fix = "accumulate gradients over more micro-batches, use larger batches, or try another plan (`paceline plan`)"
    evidence = {"share": round(share, 3), "least": round(least, 3)}
    return RunFinding("communication", "warning", text, fix, [], evidence)


def _has_accelerator(row: Mapping[str, Any]) -> bool:
    return not row["device"].startswith("cpu") and row["device"] != ""


def _whole(ms: Mapping[str, float]) -> float:
    return sum(ms.values()) or 1.0
