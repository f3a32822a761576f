"""From the lines of a drill to `Recovery`: what a failure costs, and whether the run goes on with the same losses.

fault --detected--> first other process ended --started--> new process --imports--> script --builds--> prepare
      --prepare--> --load--> first batch --first step--> first step after the failure ... first step that is new
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from paceline_lens.rehearse.drill import DrillRecord, Strike
from paceline_lens.rehearse.lines import DrillLine

_TEXT_LINES = 6


@dataclass(frozen=True)
class LossChange:
    """The first loss that is not that of the run without a failure."""

    step: int
    rank: int
    loss: float
    expected: float


@dataclass(frozen=True)
class Recovery:
    """What one failure cost. Times are in seconds; None for a part that there was not.

    Attributes:
        failure, what: the drill.
        step, rank: where it struck: in the step after this one. A link is cut some steps later than was drawn.
        survived: whether the job has gone on, from a checkpoint if there was one.
        why, fix: why not, and what to do.
        detect_s: until the first other process was ended.
        start_s: from then until the first rank was started again.
        import_s: until it runs the script: Python, torch, Paceline.
        build_s: until the script calls `prepare`: its own imports, model and data.
        prepare_s: in `prepare`.
        load_s: until it asks for its first batch: mostly the checkpoint.
        first_step_s: until its first step is over.
        recovery_s: all of these.
        new_step_s: from the fault until the first step that had not been done before.
        resumed_step: steps that the checkpoint had.
        steps_twice, samples_twice: computed a second time. None where nobody knows the samples.
        restarts: how often all processes were started again.
        compared: losses that were compared.
        change: the first that differs; None where all are the same, bit for bit.
        changes_before: whether one differs before the fault, so that the script is not reproducible at all.
    """

    failure: str
    what: str
    step: int
    rank: int
    survived: bool
    why: str = ""
    fix: str = ""
    detect_s: float | None = None
    start_s: float | None = None
    import_s: float | None = None
    build_s: float | None = None
    prepare_s: float | None = None
    load_s: float | None = None
    first_step_s: float | None = None
    recovery_s: float | None = None
    new_step_s: float | None = None
    resumed_step: int | None = None
    steps_twice: int = 0
    samples_twice: int | None = None
    restarts: int = 0
    compared: int = 0
    change: LossChange | None = None
    changes_before: bool = False

    @property
    def passed(self) -> bool:
        """Whether the job has survived, and computes what it would have computed."""
        return self.survived and (self.change is None or self.changes_before)


@dataclass(frozen=True)
class Undisturbed:
    """The run without a failure.

    Attributes:
        steps: steps that it did.
        ranks: processes.
        step_s: the median time of a step.
        first_save: steps that were done when its first checkpoint was complete; None without one.
        saves: how many checkpoints it wrote.
        save_steps: steps between two saves; None with fewer than two.
        stall_s: how long a save keeps the training waiting, on average.
        save_s: how long it takes in all.
        bytes: of the last checkpoint.
        silence_s: the longest time for which some process may wait for another one: without a line, from `prepare` on, or from
            the first process that reaches it to the last.
        seconds: from the first process to the last step.
        losses: (rank, step) -> loss, in hexadecimal.
        samples: step -> samples of all ranks until then.
    """

    steps: int
    ranks: int
    step_s: float
    first_save: int | None
    saves: int
    save_steps: int | None
    stall_s: float
    save_s: float
    bytes: int | None
    silence_s: float
    seconds: float
    losses: Mapping[tuple[int, int], str]
    samples: Mapping[int, int]


def undisturbed(lines: Sequence[DrillLine]) -> Undisturbed | None:
    """Returns what the run without a failure shows; None if it took fewer than two steps."""
    steps = [line for line in lines if line.event == "step" and line.rank == 0]
    if len(steps) < 2:
        return None
    # From a step to the next: with the median, saves and evaluations between some of them do not count.
    times = sorted(after.t - before.t for before, after in pairwise(steps))
    saves = [line for line in lines if line.event == "saved" and line.values["ok"]]
    first_save = None
    save_steps = None
    if saves:
        first_save = max(line.values["step"] for line in steps if line.t <= max(saves[0].t, steps[0].t))
    if len(saves) > 1:
        save_steps = saves[1].values["step"] - saves[0].values["step"]
    return Undisturbed(
        steps=steps[-1].values["step"],
        ranks=len({line.rank for line in lines}),
        step_s=times[len(times) // 2],
        first_save=first_save,
        saves=len(saves),
        save_steps=save_steps,
        stall_s=_average(saves, "stall_s"),
        save_s=_average(saves, "save_s"),
        bytes=saves[-1].values["bytes"] if saves else None,
        silence_s=_longest_silence(lines),
        seconds=steps[-1].t - lines[0].t,
        losses={(line.rank, line.values["step"]): line.values["loss"] for line in lines if _has_loss(line)},
        samples=_samples_until(steps),
    )


def _samples_until(lines: Sequence[DrillLine]) -> dict[int, int]:
    """Returns how many samples all ranks have computed until each step, where that is known."""
    steps = [line.values for line in lines if line.event == "step" and line.values["samples"] is not None]
    return {values["step"]: values["samples"] for values in steps}


def _average(saves: Sequence[DrillLine], name: str) -> float:
    """Returns the mean of a value over saves; 0 without any."""
    if not saves:
        return 0.0
    return float(fmean(line.values[name] for line in saves))


def _has_loss(line: DrillLine) -> bool:
    return line.event == "step" and line.values["loss"] is not None


def _longest_silence(lines: Sequence[DrillLine]) -> float:
    arrivals: dict[int, float] = {}  # when each rank has called `prepare`; before that it waits for nobody
    for line in lines:
        if line.event == "preparing":
            arrivals.setdefault(line.rank, line.t)
    longest = max(arrivals.values(), default=0.0) - min(arrivals.values(), default=0.0)
    last = dict(arrivals)
    for line in lines:
        if line.rank in last and line.t > last[line.rank]:
            longest = max(longest, line.t - last[line.rank])
            last[line.rank] = line.t
    return longest


def recovery(strike: Strike, record: DrillRecord, reference: Undisturbed) -> Recovery:
    """Returns what a failure cost.

    Args:
        strike: the fault.
        record: what happened.
        reference: the run without a failure.
    """
    lines = record.lines
    struck = record.struck
    kind = strike.kind
    if struck is None:
        why, fix = _failure(record, "the fault did not strike")
        return Recovery(kind.name, kind.what, strike.step, strike.rank, survived=False, why=why, fix=fix)
    change, compared, before = _compare(lines, struck, reference)
    done = max(line.values["step"] for line in lines if line.event == "step" and line.t <= struck)
    struck_step = strike.step if kind.strike else done
    new = [line for line in lines if line.event == "step" and line.rank == 0 and line.t > struck]
    begun = [line for line in lines if line.event == "ready" and line.rank == 0 and line.t > struck]
    parts: dict[str, float | None] = {}
    resumed = None
    twice = 0
    if begun:
        # Ranks that were not struck may have done steps until they were stopped.
        done = max(line.values["step"] for line in lines if line.event == "step" and line.t <= begun[0].t)
        parts, resumed = _parts(struck, begun[-1], lines, _first_end(record, strike, struck))
        twice = max(0, done - resumed) if resumed is not None else 0
    elif new:
        # A step that was under way may end after a link was cut, so the longest pause is the recovery.
        times = [struck, *(line.t for line in new)]
        parts = {"recovery_s": max(after - before for before, after in pairwise(times))}
    fresh = [line.t for line in new if line.values["step"] > done]
    why, fix = _verdict(record, struck, resumed, bool(fresh))
    return Recovery(
        kind.name,
        kind.what,
        struck_step,
        strike.rank,
        survived=not why,
        why=why,
        fix=fix,
        **parts,
        new_step_s=fresh[0] - struck if fresh else None,
        resumed_step=resumed,
        steps_twice=twice,
        samples_twice=_samples({**reference.samples, **_samples_until(lines)}, resumed, done, twice),
        restarts=len(begun),
        compared=compared,
        change=change,
        changes_before=before,
    )


def _first_end(record: DrillRecord, strike: Strike, struck: float) -> float | None:
    """Returns when the launchers first ended a process because of the fault; None if there was no other process."""
    own = {line.pid for line in record.lines if line.event == "strikes"}
    # A rank that was stopped stays until a launcher kills it. All others are gone at the moment of their fault.
    left_out = set() if strike.kind.name == "hang" else own
    ends = [at for pid, at in record.ended.items() if pid not in left_out and at > struck]
    return min(ends, default=None)


def _parts(
    struck: float, ready: DrillLine, lines: Sequence[DrillLine], first_end: float | None
) -> tuple[dict[str, float | None], int | None]:
    """Returns the parts of a recovery in the process of the first rank, and the step from which it went on."""
    own = [line for line in lines if line.pid == ready.pid]
    born = float(ready.values["born"])
    detected = None if first_end is None else min(first_end, born)
    at = {"struck": struck, "detected": detected, "born": max(born, struck), "ready": ready.t}
    loops = [line for line in own if line.event == "loop"]
    loop = loops[0].t if loops else None
    at["loop"] = loop
    for event in ("preparing", "prepared", "step"):
        times = [line.t for line in own if line.event == event]
        # Objects may be prepared one after the other, and others later than the first batch.
        if event == "prepared" and loop is not None:
            times = [t for t in times if t <= loop][-1:]
        at[event] = times[0] if times else None
    parts = {
        "detect_s": _between(at["struck"], at["detected"]),
        "start_s": _between(at["detected"] or at["struck"], at["born"]),
        "import_s": _between(at["born"], at["ready"]),
        "build_s": _between(at["ready"], at["preparing"]),
        "prepare_s": _between(at["preparing"], at["prepared"]),
        "load_s": _between(at["prepared"], at["loop"]),
        "first_step_s": _between(at["loop"], at["step"]),
        "recovery_s": _between(at["struck"], at["step"]),
    }
    return parts, loops[0].values["step"] if loops else None


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else max(0.0, end - begin)


def _samples(samples: Mapping[int, int], resumed: int | None, done: int, twice: int) -> int | None:
    """Returns how many samples the steps after `resumed`, up to `done`, have."""
    if not twice:
        return 0
    if resumed is None or done not in samples:
        return None
    before = 0 if resumed == 0 else samples.get(resumed)
    return None if before is None else samples[done] - before


def _compare(lines: Sequence[DrillLine], struck: float, reference: Undisturbed) -> tuple[LossChange | None, int, bool]:
    """Compares every loss with that of the undisturbed run, or, of a step that run has not, with that of the first time.

    Returns:
        the first that differs, how many were compared, and whether it was computed before the fault.
    """
    losses = dict(reference.losses)
    compared = 0
    first: LossChange | None = None
    first_at = 0.0
    for line in lines:
        if not _has_loss(line):
            continue
        step = line.values["step"]
        if (line.rank, step) not in losses:
            losses[line.rank, step] = line.values["loss"]
            continue
        expected = losses[line.rank, step]
        compared += 1
        if line.values["loss"] != expected and (first is None or step < first.step):
            first = LossChange(step, line.rank, float.fromhex(line.values["loss"]), float.fromhex(expected))
            first_at = line.t
    return first, compared, first is not None and first_at <= struck


def _verdict(record: DrillRecord, struck: float, resumed: int | None, has_new_step: bool) -> tuple[str, str]:
    """Returns why the job has not survived, and a fix; "" twice if it has."""
    if record.end in ("failed", "late") or not has_new_step:
        return _failure(record, "no step that is new came after the fault")
    has_saved = any(line.event == "saved" and line.values["ok"] and line.t < struck for line in record.lines)
    if resumed == 0 and has_saved:
        return (
            "it began again at step 0, although there was a checkpoint",
            "call `start = accelerator.resume()` after `prepare`, and begin the loop at `start.epoch`",
        )
    return "", ""


def _failure(record: DrillRecord, otherwise: str) -> tuple[str, str]:
    """Returns why a job ended or stands, with the last lines that it printed, and a fix."""
    last = record.last_lines(_TEXT_LINES)
    if record.end == "failed":
        return f"the job ended with exit code {record.codes[-1]}:\n{last}", "correct what these lines say"
    if record.end == "late":
        return (
            f"{otherwise}, and the drill was given up; the job had printed:\n{last}",
            "find out what it waits for: `paceline launch --stuck-after 60 ...` writes where each rank is",
        )
    return f"{otherwise}; the script ended first", "let it run for longer: more epochs or steps, by its own arguments"
