"""Reports a verification: a table, and for each case that differs what differs first, why, and how to fix it.

`text` is for people, `as_json` for programs. Neither computes anything: the verdicts come from `verifier.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.base.text_table import text_table
from paceline_lens.verify.cause import Diagnosis
from paceline_lens.verify.compare import FIELDS, ValueDifference
from paceline_lens.verify.result import Result, Verification

_RULES = {
    "float64": "runs in float64",
    "growth": "how one rounding grew on one process",
    "onset": "the size of the difference where it began",
    "plain": "no need: rounding does not change this",
    "none": "no need: the same bits",
}
_COLUMNS = {"rows": "rows", "loss": "loss", "gradient": "gradients", "weight": "weights", "logged": "logged"}


def text(verification: Verification, steps: int) -> str:
    """Returns the report as a person reads it.

    Args:
        steps: how many were asked for.
    """
    lines = [*_table(verification.results), ""]
    for number, result in enumerate(verification.results):
        lines += _details(result, is_repeat=number == 0)
    compared = max((result.steps for result in verification.results), default=0)
    if 0 < compared < steps:
        lines.append(f"The script took {compared} optimizer step{'s' * (compared > 1)}; {steps} were asked for.")
    lines.append(_summary(verification))
    return "\n".join(lines)


def _table(results: Sequence[Result]) -> list[str]:
    """Returns the largest relative difference of each kind, in the precision of the script; then the verdict."""
    rows = [["run", "steps", *_COLUMNS.values(), "verdict"]]
    # The first result is that of the repeated run on one process, whose case is named like the reference.
    for number, result in enumerate(results):
        name = "1 process, twice" if number == 0 else result.case.name
        sizes = [_size(result, field) for field in _COLUMNS]
        rows.append([name, str(result.steps or "-"), *sizes, _verdict(result)])
    lines = text_table(rows)
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:]]


def _size(result: Result, field: str) -> str:
    if field not in result.compared or (result.status == "failed" and not result.steps):
        return "-"
    size = result.largest.get(field, (0.0, None))[0]
    if field == "rows":
        return "other" if field in result.largest else "same"
    return f"{size:.1e}" if size else "same"


def _verdict(result: Result) -> str:
    if result.status == "failed":
        return "not compared"
    if result.status == "same":
        return "same" if not result.largest else "same, but for rounding"
    return "DIFFERENT"


def _details(result: Result, *, is_repeat: bool) -> list[str]:
    name = "1 process, twice" if is_repeat else result.case.name
    lines: list[str] = []
    if result.why:
        lines.append(f"{name}: {_verdict(result)}")
        lines += [f"  {line}" for line in result.why.splitlines()]
    first = result.first
    if first is not None:
        lines.append(f"{name}: the first difference is the {first.what}, at step {first.step}")
        if first.field != "rows":
            lines.append(
                f"  {first.value:.9g} in place of {first.reference:.9g} (relative difference {first.relative:.2g})"
            )
        lines.append(f"  rounding was told from the rest by: {_RULES[result.rule]}")
    for finding in result.findings:
        cause = finding.cause
        mark = "likely cause" if cause.is_error else "note"
        # A finding about a run that is the same stands alone, so that it names the run.
        begin = "  " if first or result.why else f"{name}: "
        lines.append(f"{begin}{mark} [{cause.name}]: {cause.title}.")
        lines.append(f"    evidence: {finding.evidence}.")
        lines.append(f"    fix: {cause.fix}")
    if result.left_out:
        values = ", ".join(result.left_out)
        lines.append(f"{name}: not compared, since two runs on one process log other values: {values}")
    if result.status == "same" and result.rule in ("float64", "growth") and result.largest:
        lines.append(f"{name}: {_rounding(result)}")
    return [*lines, ""] if lines else []


def _rounding(result: Result) -> str:
    """Says why the largest difference is called rounding."""
    # Of equal differences, the one in the field that a step computes first: the others follow from it.
    field = max(result.largest, key=lambda name: (result.largest[name][0], -FIELDS.index(name)))
    single, double = result.largest[field]
    if double is None or result.rule == "growth":
        return f"the largest difference, {single:.1e} ({field}), is within what one rounding grew to on one process"
    fell = "to nothing"
    if double and math.isfinite(single):
        fell = f"by a factor of {single / double:.0e}"
    return f"the largest difference, {single:.1e} ({field}), is rounding: in float64 it falls to {double:.1e}, {fell}"


def _summary(verification: Verification) -> str:
    counts = dict.fromkeys(("same", "different", "failed"), 0)
    for result in verification.results:
        counts[result.status] += 1
    parts = [f"{counts['same']} the same", f"{counts['different']} different", f"{counts['failed']} not compared"]
    return f"{len(verification.results)} comparisons: {', '.join(parts)}."


def as_json(verification: Verification) -> dict[str, Any]:
    """The same for programs."""
    return {
        "exit_code": verification.exit_code,
        "results": [_result_json(result) for result in verification.results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    first = None
    if result.first is not None:
        first = _difference_json(result.first)
    # Each pair is the size in the script's precision and, if it was measured, in float64.
    largest = {name: list(map(_finite, sizes)) for name, sizes in result.largest.items()}
    return {
        "run": result.case.name,
        "procs": result.case.procs,
        "settings": dict(result.case.settings),
        "status": result.status,
        "why": result.why,
        "rounding_told_by": result.rule,
        "steps": result.steps,
        "left_out": list(result.left_out),
        "first": first,
        "largest": largest,
        "findings": list(map(_finding_json, result.findings)),
    }


def _difference_json(difference: ValueDifference) -> dict[str, Any]:
    return {
        "step": difference.step,
        "field": difference.field,
        "name": difference.name,
        "value": _finite(difference.value),
        "reference": _finite(difference.reference),
        "relative": _finite(difference.relative),
    }


def _finding_json(finding: Diagnosis) -> dict[str, Any]:
    return {
        "cause": finding.cause.name,
        "is_error": finding.cause.is_error,
        "title": finding.cause.title,
        "evidence": finding.evidence,
        "fix": finding.cause.fix,
    }


def _finite(value: float | None) -> float | str | None:
    """Returns a number as JSON can hold it: infinities and NaN, which it lacks, as text."""
    if value is None or math.isfinite(value):
        return value
    return str(value)
