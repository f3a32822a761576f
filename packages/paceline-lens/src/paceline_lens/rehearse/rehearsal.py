"""`FailureRehearsal`: the job without a failure first, then each failure in a run of its own; and what follows from them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.base.errors import LaunchError, TrainError
from paceline_lens.rehearse import cable
from paceline_lens.rehearse.drill import KINDS, Drill, DrillKind, RehearsedJob, Strike
from paceline_lens.rehearse.intervals import JobCosts, SizeForecast, forecast
from paceline_lens.rehearse.lines import DrillLine
from paceline_lens.rehearse.measure import Recovery, Undisturbed, recovery, undisturbed

_SAVES = 2
_STEPS_AFTER = 5  # after the second save: a fault may strike there too, and the run goes on after it
_LEAST_TIMEOUT_S = 10.0
_LEAST_GRACE_S = 30.0
_SAFETY = 3.0
_WEEK_DAYS = 7
_LAST_LINES = 12


@dataclass(frozen=True)
class ProposedSettings:
    """What was measured, as settings.

    Attributes:
        timeout_s: `--timeout-s`.
        max_restarts: `--max-restarts`.
        grace_s: `--grace-s`.
        devices: the number for which the next ones are.
        save_steps: steps between two saves.
        save_every_s: the same in seconds.
    """

    timeout_s: float
    max_restarts: int
    grace_s: float
    devices: int
    save_steps: int
    save_every_s: float


@dataclass(frozen=True)
class RehearsalResult:
    """All that a rehearsal has found.

    Attributes:
        job: the job, with the timeout that the drills had.
        reference: the run without a failure.
        recoveries: one for each drill.
        skipped: failure -> why it was not rehearsed.
        costs: of the job; None where no recovery was measured.
        proposed, sizes: what follows from them.
    """

    job: RehearsedJob
    reference: Undisturbed
    recoveries: Sequence[Recovery]
    skipped: dict[str, str]
    costs: JobCosts | None
    proposed: ProposedSettings | None
    sizes: Sequence[SizeForecast]

    @property
    def exit_code(self) -> int:
        """0 where the job has survived every failure with the same losses, else 1."""
        return 0 if all(each.passed for each in self.recoveries) else 1


@dataclass(frozen=True)
class RehearsalLimits:
    """How a rehearsal is drawn, and how long it may take.

    Attributes:
        seed: draws steps and ranks.
        alone_s: most seconds of the run without a failure.
    """

    seed: int = 0
    alone_s: float = 600.0


class FailureRehearsal:
    """Rehearses the failures of one job.

    Args:
        job: the job.
        folder: an empty folder, with a folder for each drill.
        limits: how steps are drawn, and how long it may take.
        show: is told what runs now.
    """

    def __init__(self, job: RehearsedJob, folder: Path, limits: RehearsalLimits, show: Callable[[str], object]) -> None:
        self._job = job
        self._folder = folder
        self._limits = limits
        self._show = show
        self._draws = random.Random(limits.seed)

    def run(self, names: Sequence[str], devices: Sequence[int], device_mtbf_s: float) -> RehearsalResult:
        """Runs all drills.

        Args:
            names: of the failures.
            devices: numbers of devices for the forecast; the proposed settings are for the first of them.
            device_mtbf_s: mean time between failures of one device.

        Raises:
            LaunchError: `rehearse-script`, `rehearse-link`.
            TrainError: `rehearse-no-checkpoint`.
        """
        reference = self._alone()
        job = self._job
        if job.timeout_s is None:
            job = replace(job, timeout_s=math.ceil(max(_LEAST_TIMEOUT_S, _SAFETY * reference.silence_s)))
        skipped = {name: why for name in names if (why := self._obstacle(KINDS[name]))}
        recoveries = []
        for name in names:
            # Drawn for skipped ones too, so that each failure strikes at the same step on every machine.
            strike = self._draw(KINDS[name], reference)
            if name not in skipped:
                recoveries.append(self._drill(job, strike, reference))
        costs = _costs(reference, recoveries)
        if costs is None:
            return RehearsalResult(job, reference, recoveries, skipped, None, None, ())
        sizes = forecast(costs, devices, device_mtbf_s)
        proposed = _proposed(job, sizes[0], recoveries)
        return RehearsalResult(job, reference, recoveries, skipped, costs, proposed, sizes)

    def _alone(self) -> Undisturbed:
        """Runs the job without a failure until there is enough to compare with."""
        self._show("without a failure")
        record = Drill(self._job, self._folder / "alone").run(_has_enough, self._limits.alone_s)
        last_lines = record.last_lines(_LAST_LINES)
        if record.end == "failed":
            raise LaunchError(
                "rehearse-script",
                "the job fails by itself, before any failure is rehearsed.",
                why=f"exit code {record.codes[-1]}; it printed last:\n{last_lines}",
                fix="correct that first: `paceline launch` with the same options and script shows all of it",
            )
        ran = f"the script ran for {self._limits.alone_s / 60:g} minutes (--minutes)"
        if record.end == "over":
            ran = "the script ran to its end"
        reference = undisturbed(record.lines)
        if reference is None:
            steps = "one step" if any(line.event == "step" for line in record.lines) else "no step"
            raise LaunchError(
                "rehearse-script",
                "the job took fewer than two optimizer steps, so there is nothing to compare.",
                why=f"{ran}, with {steps} of a prepared optimizer; it printed last:\n{last_lines}",
                fix="let `accelerator.prepare` prepare the optimizer, and let the script take some steps",
            )
        self._need_checkpoint(reference, ran)
        return reference

    def _need_checkpoint(self, reference: Undisturbed, ran: str) -> None:
        """Checks that there is a checkpoint to go on from, before the last steps.

        Args:
            reference: the run without a failure.
            ran: how long the script ran, in words.

        Raises:
            TrainError: `rehearse-no-checkpoint`.
        """
        if reference.first_save is None:
            why = f"{ran}, did {reference.steps} steps, and saved nothing"
        elif reference.first_save + 2 > reference.steps:
            why = f"its first checkpoint was complete after step {reference.first_save} of {reference.steps}: the end"
        else:
            return
        every = max(1, reference.steps // 3)
        raise TrainError(
            "rehearse-no-checkpoint",
            "the job survives no failure: there would be no checkpoint to go on from.",
            why=why,
            fix=f"save in the loop, as in `if step % {every} == 0: accelerator.save_state()`, and call `accelerator.resume()` "
            "after `prepare`",
        )

    def _obstacle(self, kind: DrillKind) -> str:
        """Returns why a failure cannot be rehearsed here; "" if it can."""
        if not kind.several:
            return ""
        if self._job.nodes == 1:
            return "it needs several hosts: `--nodes 2` lets this machine stand for two"
        return cable.obstacle()

    def _draw(self, kind: DrillKind, reference: Undisturbed) -> Strike:
        """Chooses the step after which a fault strikes, and the rank."""
        assert reference.first_save is not None
        step = self._draws.randint(reference.first_save + 1, reference.steps - 1)
        rank = self._draws.randrange(reference.ranks)
        if kind.name == "host":
            # Of the last host: the others go on, and learn of it.
            rank = reference.ranks // self._job.nodes * (self._job.nodes - 1)
        return Strike(kind, step, rank)

    def _drill(self, job: RehearsedJob, strike: Strike, reference: Undisturbed) -> Recovery:
        self._show(f"{strike.kind.name}: {strike.kind.what}, after step {strike.step}")

        def reached(lines: Sequence[DrillLine], since: float) -> bool:
            return has_gone_on(lines, since, reference.steps, starts_again=bool(strike.kind.strike))

        limit_s = 120 + 3 * reference.seconds + 2 * (job.timeout_s or 0)
        drill = Drill(job, self._folder / strike.kind.name, strike)
        return recovery(strike, drill.run(reached, limit_s), reference)


def has_gone_on(lines: Sequence[DrillLine], since: float, least: int, *, starts_again: bool) -> bool:
    """Returns whether a run has done a step, after a failure, that is new and not below `least`.

    Args:
        lines: of the whole drill.
        since: when the failure was over.
        least: a number of steps.
        starts_again: whether the failure ends the processes. Only a link can be cut without that.
    """
    own = [line for line in lines if line.rank == 0]
    begun = [line.t for line in own if line.event == "ready" and line.t > since]
    if starts_again and not begun:
        return False
    # Before the new start, a rank may still end the step that was under way, or several.
    began = max(begun, default=since)
    before = [line.values["step"] for line in own if line.event == "step" and line.t <= began]
    after = [line.values["step"] for line in own if line.event == "step" and line.t > began]
    return bool(after) and after[-1] >= max(least, max(before, default=0) + 1)


def _has_enough(lines: Sequence[DrillLine], since: float) -> bool:
    """Returns whether a run has saved twice, and gone on for some steps."""
    saves = [line for line in lines if line.event == "saved" and line.values["ok"]]
    if len(saves) < _SAVES:
        return False
    steps_after = [line for line in lines if line.event == "step" and line.rank == 0 and line.t > saves[_SAVES - 1].t]
    return len(steps_after) >= _STEPS_AFTER


def _costs(reference: Undisturbed, recoveries: Sequence[Recovery]) -> JobCosts | None:
    """Returns what was measured. A recovery is the slowest after a kill; a hang is seen later, and a SIGTERM loses nothing."""
    times = []
    for each in recoveries:
        if each.survived and each.recovery_s is not None and each.failure in ("rank", "host"):
            times.append(each.recovery_s)
    if not times:
        return None
    late_s = max(0.0, reference.save_s - reference.stall_s)
    return JobCosts(reference.step_s, reference.stall_s, late_s, max(times))


def _proposed(job: RehearsedJob, size: SizeForecast, recoveries: Sequence[Recovery]) -> ProposedSettings:
    expected = size.failures_per_day * _WEEK_DAYS
    saving = [each.detect_s for each in recoveries if each.failure == "preempt" and each.detect_s is not None]
    return ProposedSettings(
        timeout_s=job.timeout_s or _LEAST_TIMEOUT_S,
        max_restarts=math.ceil(expected + 3 * math.sqrt(expected)),
        grace_s=math.ceil(max([_LEAST_GRACE_S, *(_SAFETY * seconds for seconds in saving)])),
        devices=size.devices,
        save_steps=size.steps,
        save_every_s=size.daly_s,
    )
