"""`standing` explains why a run stands still: which rank is the cause, and which ones wait for it. `findings.py` calls it.

Ranks write every second, whatever the training loop does. A rank that has written nothing for some seconds is stopped, or a
call does not let its other threads run. Among the ranks that write, a rank that has been in one phase for much longer than a
step stands. If it was seen inside a collective, it waits for others, in whichever phase it is. Not every wait is seen: DDP's
reducer waits in compiled code. So among the ranks that were not seen to wait, the cause is the one whose phase waits least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_lens.watch.finding import RunFinding, capital, counted, duration, named

# Ranks write every second. A call that holds Python's lock for a few seconds is usual, and no finding.
_SILENT_S = 8.0
# A rank stands if it has been in one phase for so many seconds, and for so many usual steps.
_STANDING_S = 10.0
_STANDING_STEPS = 5
_FIRST_STEP_S = 120.0  # the first step compiles, and fills loaders
_START_S = 60.0
# How much a rank waits for others in a phase: 0 for never, 2 for all the time.
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


def standing(snapshot: Mapping[str, Any]) -> list[RunFinding]:
    """Returns findings about ranks that have not begun, that are silent, or that stand still."""
    if snapshot["state"] == "ended":
        return []
    rows = snapshot["ranks"]
    silent = [row for row in rows if row["silent_s"] > _SILENT_S]
    # What a silent rank wrote last is out of date. It is reported alone, since the others most likely wait for it.
    if silent:
        return [_silence(silent, snapshot)]
    return [*_missing(snapshot), *_standing(rows, snapshot)]


def _missing(snapshot: Mapping[str, Any]) -> list[RunFinding]:
    """Returns a finding about ranks that have not begun, in the first round of a run."""
    elapsed = snapshot["elapsed_s"]
    heard = snapshot["world"]["heard"]
    procs = snapshot["world"]["procs"]
    if heard >= procs or elapsed < _START_S or len(snapshot["rounds"]) > 1:
        return []
    evidence = {"heard": heard, "procs": procs, "elapsed_s": elapsed}
    if heard == 0:
        text = f"No rank has written anything in {duration(elapsed)}: the script has not made its Accelerator yet."
        return [RunFinding("not-begun", "note", text, "only scripts that use Paceline are watched", [], evidence)]
    begun = {row["rank"] for row in snapshot["ranks"]}
    missing = [rank for rank in range(procs) if rank not in begun]
    text = f"{counted(len(missing))} of {procs} have not begun after {duration(elapsed)}."
    return [RunFinding("not-begun", "warning", text, "look at their output (`--log-dir`)", missing, evidence)]


def _silence(silent: Sequence[_Row], snapshot: Mapping[str, Any]) -> RunFinding:
    """Returns a finding about the ranks that have written nothing for some seconds."""
    seconds = max(row["silent_s"] for row in silent)
    others = [row for row in snapshot["ranks"] if row not in silent]
    evidence: dict[str, float | str] = {"silent_s": seconds, "standing_s": snapshot["standing_s"] or 0.0}
    numbers = [row["rank"] for row in silent]
    # As long as steps end, the run goes on in spite of the silent ranks.
    stops = not others or snapshot["standing_s"] is None or snapshot["standing_s"] > _SILENT_S
    if not others and len(silent) > 1:
        text = (
            f"No rank has written anything for {duration(seconds)}: the processes are stopped, or their disk is full."
        )
        return RunFinding("silent-rank", "error", text, "look at the launcher's terminal", [], evidence, stops)
    first = silent[0]
    stopped = [row for row in silent if row["process"] == "stopped"]
    has = "has"
    processes_are = f"its process ({first['pid']}) is"
    if len(silent) > 1:
        has = "have"
        processes_are = "their processes are"
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
    return RunFinding("silent-rank", "error", capital(text), fix, numbers, evidence, stops)


def _standing(rows: Sequence[_Row], snapshot: Mapping[str, Any]) -> list[RunFinding]:
    """Returns a finding about the ranks that have been in one phase for much longer than a step."""
    usual_ms = snapshot["speed"]["recent"]["usual_step_ms"]
    # Before the first step ends, nobody knows how long a step takes.
    limit_s = _FIRST_STEP_S
    if usual_ms is not None:
        limit_s = max(_STANDING_S, _STANDING_STEPS * usual_ms / 1e3)
    stands = [row for row in rows if row["phase_s"] > limit_s]
    standing_s = snapshot["standing_s"]
    steps_end = standing_s is not None and standing_s < limit_s
    if not stands or steps_end:
        return []
    seconds = max(row["phase_s"] for row in stands)
    evidence: dict[str, float | str] = {"phase_s": seconds, "limit_s": round(limit_s, 1)}
    moving = [row for row in rows if row not in stands]
    least = min(map(_waiting, stands))
    # If all ranks that stand wait for others, the cause is one that does not stand.
    if least > (0, 0) and moving:
        return [_elsewhere(moving, stands, snapshot, evidence)]
    causes = [row for row in stands if _waiting(row) == least]
    waiters = [row for row in rows if row not in causes]
    phase = causes[0]["phase"]
    place = causes[0]["at"]
    evidence |= {"phase": phase, "at": place}
    what = f"been {_in(phase)} for {duration(seconds)}"
    if place:
        what += f", at {place}"
    is_outside = all(row["phase"] in ("rest", "checkpoint") for row in stands)
    if not waiters:
        return [_all_stand(rows, what, is_outside, snapshot, evidence)]
    verb = "has" if len(causes) == 1 else "have"
    text = capital(f"{named(causes, snapshot)} {verb} {what}. {_waiters(waiters)}")
    numbers = [row["rank"] for row in causes]
    # One rank may evaluate or save alone, while the others wait for it in a barrier: that is no error.
    if is_outside and not moving:
        return [RunFinding("outside-step", "note", text, "", numbers, evidence)]
    return [RunFinding("standing-rank", "error", text, _FIX, numbers, evidence, stops=True)]


def _all_stand(
    rows: Sequence[_Row], what: str, is_outside: bool, snapshot: Mapping[str, Any], evidence: dict[str, float | str]
) -> RunFinding:
    """Returns a finding about ranks that all stand, and of which none waits more than another.

    Args:
        rows: all ranks.
        what: what they have done for how long, in words.
        is_outside: whether all of them are outside of the training step.
        snapshot: the snapshot of the run.
        evidence: the evidence of the finding.
    """
    who = "The rank has" if len(rows) == 1 else f"All {counted(len(rows))} have"
    text = f"{who} {what}."
    if is_outside:
        return RunFinding("outside-step", "note", text, "", [], evidence)
    furthest = max(row["step"] for row in rows)
    behind = [row for row in rows if row["step"] < furthest]
    if behind:
        verb = "is" if len(behind) == 1 else "are"
        text += f" {capital(named(behind, snapshot))} {verb} a step behind: not all ranks call the same collectives."
    numbers = [row["rank"] for row in behind]
    return RunFinding("standing-rank", "error", text, _FIX, numbers, evidence, stops=True)


_FIX = "the report of the stacks says where each rank is: `paceline launch` prints it, and SIGUSR1 to it asks for one"


def _elsewhere(
    moving: Sequence[_Row], stands: Sequence[_Row], snapshot: Mapping[str, Any], evidence: dict[str, float | str]
) -> RunFinding:
    """Returns a finding about the ranks that do something else while all others wait for them."""
    phase = moving[0]["phase"]
    verb = "does" if len(moving) == 1 else "do"
    text = f"{named(moving, snapshot)} {verb} something else ({_in(phase)}). {_waiters(stands)}"
    fix = "all ranks must do the same number of steps: a loader that is not prepared, or a loop under `is_main_process`"
    numbers = [row["rank"] for row in moving]
    return RunFinding("standing-rank", "error", capital(text), fix, numbers, evidence, stops=True)


def _waiting(row: _Row) -> tuple[int, int]:
    """Returns a sort key for how much a rank waits for others: first by what was seen of it, then by its phase."""
    by_phase = _WAITING.get(row["phase"], 0)
    # A wait that was seen is certain, whichever phase it is in.
    if row["waits"]:
        return 2, by_phase
    return by_phase, by_phase


def _in(phase: str) -> str:
    """Says what a rank does in a phase."""
    return _IN.get(phase, f"in {phase}")


def _waiters(rows: Sequence[_Row]) -> str:
    """Says how many ranks wait, and in which phases."""
    places: set[str] = set()
    for row in rows:
        places.add(_OUTSIDE if row["phase"] == "rest" else f"in {row['phase']}")
    # "in forward and in reduce" becomes "in forward and reduce".
    where = " and ".join(sorted(places)).replace(" and in ", " and ")
    wait = "waits" if len(rows) == 1 else "wait"
    return f"{counted(len(rows))} {wait} for it {where}."
