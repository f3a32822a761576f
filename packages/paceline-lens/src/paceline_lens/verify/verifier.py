"""`Verifier` runs and compares what a verification needs, in this order.

    one process              the reference
    one process, again       what differs here is not due to ranks
    the script from before   on request: both scripts as they are, on one process
    each case                the same global batches under a plan, on several processes
    float64                  the reference and the case once more: rounding almost vanishes, and what remains is real
    nudged                   if the script does not run in float64: one process, its initial weights changed by one rounding

A script that constructs no `Accelerator` is verified by `BareVerifier`.
It does not start processes itself: `LaunchedRuns` forks them as `paceline launch` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline_lens.verify.bare.verifier import BareVerifier
from paceline_lens.verify.case import RunFailed, VerifyCase
from paceline_lens.verify.causes import Evidence, diagnose
from paceline_lens.verify.compare import (
    EPS,
    RecordedRun,
    ValueDifference,
    beside,
    differences,
    is_plain,
    judged_by_double,
    judged_by_growth,
    judged_by_onset,
)
from paceline_lens.verify.launched import LaunchedRuns
from paceline_lens.verify.result import Result, Rule, Status, Verification


class Verifier:
    """Verifies one script.

    Args:
        runs: runs it.
        tell: called with one line before each run.
    """

    def __init__(self, runs: LaunchedRuns, tell: Callable[[str], object] = lambda line: None) -> None:
        self._runs = runs
        self._tell = tell
        self._reference: RecordedRun
        self._unsteady: set[str] = set()  # logged values that differ in two runs on one process
        self._own: set[str] = set()  # names of causes that the reference shows by itself
        self._double: RecordedRun | str | None = None  # the reference in float64, or why there is none
        self._growth: Sequence[ValueDifference] | None = None

    def verify(self, cases: Sequence[VerifyCase]) -> Verification:
        """Runs and compares everything."""
        # Without a reference there is nothing to compare with, so that its failure ends the verification.
        alone = VerifyCase(1)
        self._tell("1 process, the reference")
        try:
            self._reference = RecordedRun.of(alone.name, self._runs(alone))
        except RunFailed as error:
            return Verification([Result(alone, "failed", why=str(error))])
        if self._reference.recordings[0].bare:
            return Verification(BareVerifier(self._runs, self._tell).verify(cases))
        repeat = self._repeated(alone)
        results = [repeat]
        # If one process does not repeat its own numbers, or this is unknown, a comparison with several processes says nothing.
        if repeat.first is None and repeat.status != "failed":
            if self._runs.plain is not None:
                results.append(self._beside_plain(self._runs.plain.name))
            results += [self._compared(case) for case in cases if case != alone]
        return Verification(results)

    def _repeated(self, alone: VerifyCase) -> Result:
        """Runs the reference once more, and finds what it does by itself."""
        self._tell("1 process, once more")
        reference = self._reference
        try:
            again = RecordedRun.of(alone.name, self._runs(alone, again=True))
        except RunFailed as error:
            return Result(alone, "failed", why=str(error))
        own_findings = diagnose(Evidence(reference, reference))
        self._own = {finding.cause.name for finding in own_findings}
        apart = differences(again, reference)
        # Logged values that depend on time, such as samples a second, differ in every run and say nothing about the training.
        self._unsteady = {difference.name for difference in apart if difference.field == "logged"}
        apart = judged_by_onset(self._steady(apart), self._eps)
        rule: Rule = "none"
        if apart:
            rule = "onset"
        evidence = Evidence(again, reference, apart, is_repeat=True)
        findings = [*diagnose(evidence), *own_findings]
        first = evidence.first
        has_own_error = any(finding.cause.is_error for finding in own_findings)
        status: Status = "same"
        if first is not None or has_own_error:
            status = "different"
        left_out: Sequence[str] = ()
        if first is None:
            left_out = sorted(self._unsteady)
        largest = _largest(apart, None)
        return Result(alone, status, "", rule, first, findings, largest, len(reference.steps), left_out)

    def _beside_plain(self, name: str) -> Result:
        """Runs the script from before, and this one, both as they are on one process, and compares them.

        Nothing is turned off: on one process a prepared loop draws and computes what the plain one does, to the last bit.
        """
        case = VerifyCase(1, plain=name)
        try:
            self._tell(f"{name}, as it is")
            plain = RecordedRun.of(name, self._runs.run_plain())
            self._tell("1 process, as it is")
            run = RecordedRun.of("1 process", self._runs(VerifyCase(1), as_written=True))
        except RunFailed as error:
            return Result(case, "failed", why=str(error))
        pair = beside(run, plain)
        if isinstance(pair, str):
            return Result(case, "different", why=pair)
        # The last bits may differ for reasons outside of Paceline, such as another implementation of the same optimizer.
        apart = judged_by_onset(differences(*pair), self._eps)
        evidence = Evidence(*pair, apart, is_plain=True)
        first = evidence.first
        status: Status = "same"
        why = ""
        rule: Rule = "none"
        if apart:
            rule = "onset"
        if first is not None:
            status = "different"
        elif len(run.steps) != len(plain.steps):
            status = "different"
            why = f"it took {len(run.steps)} steps, and {name} {len(plain.steps)}"
        return Result(case, status, why, rule, first, diagnose(evidence), _largest(apart, None), len(pair[0].steps))

    def _compared(self, case: VerifyCase) -> Result:
        """Runs one case, and compares it with the reference."""
        self._tell(case.name)
        reference = self._reference
        try:
            run = RecordedRun.of(case.name, self._runs(case))
        except RunFailed as error:
            return Result(case, "failed", why=str(error))
        # In this order: no difference; one that rounding cannot make; otherwise runs in float64 tell rounding from the rest;
        # and if the script does not run in float64, the measured growth of rounding does.
        single = self._steady(differences(run, reference))
        rule: Rule = "none"
        evidence = Evidence(run, reference, single)
        double: Sequence[ValueDifference] | None = None
        if is_plain(single):
            rule = "plain"
        elif single:
            pair = self._in_double(case)
            if pair is None:
                rule = "growth"
                evidence = Evidence(run, reference, self._judged_by_growth(single))
            else:
                rule = "float64"
                double = judged_by_double(single, self._steady(differences(*pair)))
                evidence = Evidence(pair[0], pair[1], double)
                # A script may still compute some part in float32, whose rounding then remains in float64 runs. So a small
                # difference there must also be larger than the measured growth of rounding.
                if evidence.first is not None and evidence.first.relative < math.sqrt(self._eps):
                    grown = Evidence(run, reference, self._judged_by_growth(single))
                    if grown.first is None or grown.first.field == "gathered":
                        rule = "growth"
                        evidence = grown
        # Causes that one process shows already are reported once, with the repeated run.
        findings = [finding for finding in diagnose(evidence) if finding.cause.name not in self._own]
        first = evidence.first
        causes = [finding.cause for finding in findings]
        status: Status = "same"
        why = ""
        # Numbers that the script draws anew in each run would differ without any fault of the plan.
        if any(cause.explains == "difference" and not cause.is_error for cause in causes):
            status = "failed"
            why = "what differs is drawn at random, so that it cannot be compared"
        elif len(run.steps) != len(reference.steps) and first is None:
            status = "different"
            why = f"it took {len(run.steps)} steps, and one process {len(reference.steps)}"
        elif first is not None or any(cause.is_error for cause in causes):
            status = "different"
        return Result(case, status, why, rule, first, findings, _largest(single, double), len(run.steps))

    def _steady(self, apart: Sequence[ValueDifference]) -> list[ValueDifference]:
        """Returns the differences without those of logged values that differ in two runs on one process."""
        return [d for d in apart if d.field != "logged" or d.name not in self._unsteady]

    def _in_double(self, case: VerifyCase) -> tuple[RecordedRun, RecordedRun] | None:
        """Runs the case and the reference in float64; returns None if the script does not run in it."""
        # The reference in float64 is run once, and only if some case needs it.
        if self._double is None:
            self._tell("1 process, in float64")
            try:
                self._double = RecordedRun.of("1 process, float64", self._runs(VerifyCase(1), double=True))
            except RunFailed as error:
                self._double = str(error)
        if isinstance(self._double, str):
            return None
        self._tell(f"{case.name}, in float64")
        try:
            run = RecordedRun.of(case.name, self._runs(case, double=True))
        except RunFailed:
            return None
        return run, self._double

    @property
    def _eps(self) -> float:
        """The machine epsilon of the precision in which the script computes."""
        return EPS.get(self._reference.recordings[0].dtype, EPS["float32"])

    def _judged_by_growth(self, single: Sequence[ValueDifference]) -> list[ValueDifference]:
        """Judges differences by how far one rounding grows on one process, which is measured once."""
        eps = self._eps
        if self._growth is None:
            self._tell("1 process, weights changed by one rounding")
            try:
                nudged = RecordedRun.of("1 process, nudged", self._runs(VerifyCase(1), nudge=eps))
                self._growth = differences(nudged, self._reference)
            except RunFailed:
                # Without a measurement only differences of a few roundings count as rounding.
                self._growth = []
        return judged_by_growth(single, self._growth, eps)


def _largest(
    single: Sequence[ValueDifference], double: Sequence[ValueDifference] | None
) -> dict[str, tuple[float, float | None]]:
    """Returns the largest difference of each field, in the script's precision and in float64 if that was run."""
    sizes: dict[str, tuple[float, float | None]] = {}
    for field_name in dict.fromkeys(difference.field for difference in single):
        own = max(difference.relative for difference in single if difference.field == field_name)
        in_double = None
        if double is not None:
            in_double = max((d.relative for d in double if d.field == field_name), default=0.0)
        sizes[field_name] = (own, in_double)
    return sizes
