"""Findings about a run that stands still: which rank is the cause, and which ones wait for it.

A rank that has written nothing for some seconds is stopped, or one call keeps its threads from running: ranks write every
second, whatever the training loop does. Among those that write, a rank which is in a phase for much longer than a step is
standing. A rank that was seen inside of a collective waits for others, in whichever phase it is. Not every wait is seen: DDP's
reducer waits in compiled code. So of the ranks that were not seen to wait, the cause is the one in the phase that waits least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.watch.finding import Finding, capital, counted, duration, named

_SILENT_S = 8.0  # ticks come every second; a call that holds Python's lock for a few is nothing to speak of
_STANDING_S = 10.0
_STANDING_STEPS = 5
_FIRST_STEP_S = 120.0  # the first step compiles, and fills loaders
_START_S = 60.0
# From phases in which a rank never waits for others to phases in which it does nothing else.
_WAITING = {
    "data": 0,
    "rest": 0,
    "clip": 0,
    "checkpoint": 0,
    "step": 1,
    "forward": 1,
    "backward": 1,
    "reduce": 2,
    "pipeline": 2,
}
_IN = {
    "data": "waiting for its data",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "reduce": "in reduce (waiting for gradients of others)",
    "pipeline": "waiting for other pipeline stages",
    "clip": "clipping gradients",
    "step": "in the optimizer's step",
    "checkpoint": "saving a checkpoint",
    "rest": "outside of the training step (evaluation, logging, the script's own code)",
}
_OUTSIDE = "outside of the training step"
_Row = Mapping[str, Any]


def standing(snapshot: Mapping[str, Any]) -> list[Finding]:
    """Ranks that have not begun, that are silent, or that stand still."""
    if snapshot["state"] == "ended":
        return []
    rows = snapshot["ranks"]
    silent = [row for row in rows if row["silent_s"] > _SILENT_S]
    if silent:
        return [_silence(silent, snapshot)]
    return [*_missing(snapshot), *_standing(rows, snapshot)]


def _missing(snapshot: Mapping[str, Any]) -> list[Finding]:
    world, elapsed = snapshot["world"], snapshot["elapsed_s"]
    heard, procs = world["heard"], world["procs"]
    if heard >= procs or elapsed < _START_S or snapshot["rounds"][1:]:
        return []
    evidence = {"heard": heard, "procs": procs, "elapsed_s": elapsed}
    if heard == 0:
        text = f"No rank has written anything in {duration(elapsed)}: the script has not made its Accelerator yet."
        return [Finding("not-begun", "note", text, "only scripts that use Paceline are watched", [], evidence)]
    begun = {row["rank"] for row in snapshot["ranks"]}
    missing = [rank for rank in range(procs) if rank not in begun]
    text = f"{counted(len(missing))} of {procs} have not begun after {duration(elapsed)}."
    return [Finding("not-begun", "warning", text, "look at their output (`--log-dir`)", missing, evidence)]


def _silence(silent: Sequence[_Row], snapshot: Mapping[str, Any]) -> Finding:
    seconds = max(row["silent_s"] for row in silent)
    others = [row for row in snapshot["ranks"] if row not in silent]
    evidence: dict[str, float | str] = {"silent_s": seconds, "standing_s": snapshot["standing_s"] or 0.0}
    numbers = [row["rank"] for row in silent]
    stops = not others or snapshot["standing_s"] is None or snapshot["standing_s"] > _SILENT_S
    if not others and len(silent) > 1:
        text = (
            f"No rank has written anything for {duration(seconds)}: the processes are stopped, or their disk is full."
        )
        return Finding("silent-rank", "error", text, "look at the launcher's terminal", [], evidence, stops)
    first = silent[0]
    stopped = [row for row in silent if row["process"] == "stopped"]
    processes_are, has = f"its process ({first['pid']}) is", "has"
    if len(silent) > 1:
        processes_are, has = "their processes are", "have"
    if len(stopped) == len(silent):
        why = f"{processes_are} stopped by a signal (SIGSTOP)."
    else:
        why = f"{processes_are} stopped (SIGSTOP), or one call lets no other thread run."
    text = f"{named(silent, snapshot)} {has} given no sign of life for {duration(seconds)}: {why}"
    if others and stops:
        text += f" {_waiters(others)}"
    where = f"on {first['host']}: " if first["host"] else ""
    fix = f"{where}`kill -CONT {first['pid']}` lets it go on"
    if not stopped:
        fix = (
            f"{where}`ps -o pid,stat,wchan -p {first['pid']}`; `kill -CONT {first['pid']}` lets a stopped one (T) go on"
        )
    return Finding("silent-rank", "error", capital(text), fix, numbers, evidence, stops)


def _standing(rows: Sequence[_Row], snapshot: Mapping[str, Any]) -> list[Finding]:
    usual_ms = snapshot["speed"]["recent"]["usual_step_ms"]
    limit = _FIRST_STEP_S
    if usual_ms is not None:
        limit = max(_STANDING_S, _STANDING_STEPS * usual_ms / 1e3)
    since = snapshot["standing_s"]
    stands = [row for row in rows if row["phase_s"] > limit]
    if not stands or (since is not None and since < limit):
        return []
    seconds = max(row["phase_s"] for row in stands)
    evidence: dict[str, float | str] = {"phase_s": seconds, "limit_s": round(limit, 1)}
    moving = [row for row in rows if row not in stands]
    least = min(map(_waiting, stands))
    causes = [row for row in stands if _waiting(row) == least]
    if least > (0, 0) and moving:
        return [_elsewhere(moving, stands, snapshot, evidence)]
    phase = causes[0]["phase"]
    is_outside = all(row["phase"] in ("rest", "checkpoint") for row in stands)
    waiters = [row for row in rows if row not in causes]
    place = f", at {causes[0]['at']}" if causes[0]["at"] else ""
    evidence |= {"phase": phase, "at": causes[0]["at"]}
    if waiters:
        verb = "has" if len(causes) == 1 else "have"
        text = f"{named(causes, snapshot)} {verb} been {_in(phase)} for {duration(seconds)}{place}. {_waiters(waiters)}"
        numbers = [row["rank"] for row in causes]
        # One rank may well evaluate or save alone, while the others wait for it in a barrier.
        if is_outside and not moving:
            return [Finding("outside-step", "note", capital(text), "", numbers, evidence)]
        return [Finding("standing-rank", "error", capital(text), _FIX, numbers, evidence, stops=True)]
    furthest = max(row["step"] for row in rows)
    behind = [row for row in rows if row["step"] < furthest]
    who = "The rank has" if len(rows) == 1 else f"All {counted(len(rows))} have"
    text = f"{who} been {_in(phase)} for {duration(seconds)}{place}."
    if is_outside:
        return [Finding("outside-step", "note", text, "", [], evidence)]
    if behind and len(rows) > 1:
        text += f" {capital(named(behind, snapshot))} is a step behind: not all ranks call the same collectives."
    return [Finding("standing-rank", "error", text, _FIX, [row["rank"] for row in behind], evidence, stops=True)]


_FIX = "the report of the stacks says where each rank is: `paceline launch` prints it, and SIGUSR1 to it asks for one"


def _elsewhere(
    moving: Sequence[_Row], stands: Sequence[_Row], snapshot: Mapping[str, Any], evidence: dict[str, float | str]
) -> Finding:
    phase = moving[0]["phase"]
    verb = "does" if len(moving) == 1 else "do"
    text = f"{named(moving, snapshot)} {verb} something else ({_in(phase)}). {_waiters(stands)}"
    fix = "all ranks must do the same number of steps: a loader that is not prepared, or a loop under `is_main_process`"
    numbers = [row["rank"] for row in moving]
    return Finding("standing-rank", "error", capital(text), fix, numbers, evidence, stops=True)


def _waiting(row: _Row) -> tuple[int, int]:
    """How much a rank waits for others, in order; those that were seen inside of a collective come last."""
    of_phase = _WAITING.get(row["phase"], 0)
    seen = 2 if row["waits"] else of_phase
    return seen, of_phase


def _in(phase: str) -> str:
    return _IN.get(phase, f"in {phase}")


def _waiters(rows: Sequence[_Row]) -> str:
    places: set[str] = set()
    for row in rows:
        places.add(_OUTSIDE if row["phase"] == "rest" else f"in {row['phase']}")
    where = " and ".join(sorted(places)).replace(" and in ", " and ")
    wait = "waits" if len(rows) == 1 else "wait"
    return f"{counted(len(rows))} {wait} for it {where}."
