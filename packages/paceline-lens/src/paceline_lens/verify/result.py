"""What a verification finds: a `Result` for each case, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline_lens.verify.case import VerifyCase
from paceline_lens.verify.cause import Diagnosis
from paceline_lens.verify.compare import FIELDS, ValueDifference

Status = Literal["same", "different", "failed"]
Rule = Literal["float64", "growth", "onset", "plain", "none"]


@dataclass(frozen=True)
class Result:
    """The result of one case.

    Attributes:
        case: the case.
        status: "same" except for rounding, "different", or "failed" if there is nothing to compare.
        why: why it failed.
        rule: how rounding was distinguished from real differences: by runs in "float64", by the measured "growth" of
            rounding, or by the size of the difference where it began ("onset"); "plain" if rounding cannot have made it, and
            "none" if there is no difference.
        first: the first real difference; None if there is none.
        findings: causes of the difference, and of what the run does by itself.
        largest: by field, the largest difference in the precision of the script, and (under the rule "float64") in float64.
        steps: the number of steps that were compared.
        compared: the fields that were compared.
        left_out: logged values that are not compared, since they differ in two runs on one process.
    """

    case: VerifyCase
    status: Status
    why: str = ""
    rule: Rule = "none"
    first: ValueDifference | None = None
    findings: Sequence[Diagnosis] = field(default_factory=list)
    largest: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    steps: int = 0
    left_out: Sequence[str] = ()
    compared: Sequence[str] = FIELDS

    @property
    def causes(self) -> list[str]:
        """The names of the causes that make the numbers wrong."""
        return [finding.cause.name for finding in self.findings if finding.cause.is_error]


@dataclass(frozen=True)
class Verification:
    """The results of all cases; the first one is the repeated run on one process."""

    results: Sequence[Result]

    @property
    def exit_code(self) -> int:
        """0 if all are the same, 1 if one differs, and 2 if none differs but one could not be compared."""
        statuses = {result.status for result in self.results}
        if "different" in statuses:
            return 1
        return 2 if "failed" in statuses else 0
