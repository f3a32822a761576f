"""Reports the findings of all checks on an examination, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from paceline.base.text_table import text_table
from paceline.base.version import VERSION
from paceline_hosts.doctor import units
from paceline_hosts.doctor.facts import Examination, LinkFacts
from paceline_hosts.doctor.finding import CHECKS, LEVELS, Finding

FORMAT = 1  # version of the JSON; a field may be added without a new number
_LARGEST_MATRIX = 8  # number of hosts; with more, the table would be wider than a terminal


@dataclass(frozen=True)
class DoctorReport:
    """Holds the findings on an examination.

    Attributes:
        examination: the facts that the findings are about.
        findings: pairs of the name of a check and a finding, the worst last.
        seconds: how long the examination took.
    """

    examination: Examination
    findings: tuple[tuple[str, Finding], ...]
    seconds: float

    @classmethod
    def of(cls, examination: Examination, seconds: float) -> DoctorReport:
        """Lets every check judge the facts, and sorts the findings."""
        findings: list[tuple[str, Finding]] = []
        for check in CHECKS:
            findings += [(check.name, finding) for finding in check.judge(examination)]
        # The worst comes last, because people look first at the end of the output in a terminal.
        findings.sort(key=lambda row: LEVELS.index(row[1].level))
        return cls(examination, tuple(findings), seconds)

    def count(self, level: str) -> int:
        """Returns the number of findings of a level."""
        return sum(finding.level == level for _, finding in self.findings)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 1 if there is a problem, otherwise 0."""
        return 1 if self.count("problem") else 0

    def text(self) -> str:
        """Returns the report for people: findings with their fixes, tables of links, and a summary."""
        rows = [(finding.level, check, finding.where, finding.what) for check, finding in self.findings]
        lines = []
        for line, (_, finding) in zip(text_table(rows), self.findings, strict=True):
            lines.append(line)
            if finding.fix:
                lines.append(f"{'':9}fix: {finding.fix}")
        summary = f"{_counted(self.count('problem'), 'problem')}, {_counted(self.count('warning'), 'warning')}"
        summary += f", {_counted(len(self.examination.hosts), 'host')}, {self.seconds:.1f} s"
        return "\n".join([*lines, *self._matrices(), "", summary])

    def _matrices(self) -> list[str]:
        names = list(self.examination.facts)
        if not self.examination.links or len(names) > _LARGEST_MATRIX:
            return []
        bandwidth = matrix(names, self.examination.links, lambda link: units.rate(link.bytes_per_s))
        latency = matrix(names, self.examination.links, lambda link: units.seconds(link.latency_s))
        return ["", "bandwidth from the host of a row to that of a column", *bandwidth, "", "latency", *latency]

    def to_json(self) -> dict[str, Any]:
        """Returns the report for programs, whose fields docs/how-to/doctor.md describes."""
        return {
            "format": FORMAT,
            "paceline": VERSION,
            "hosts": list(self.examination.hosts),
            "seconds": round(self.seconds, 2),
            "problems": self.count("problem"),
            "warnings": self.count("warning"),
            "findings": [{"check": check, **asdict(finding)} for check, finding in self.findings],
            "facts": asdict(self.examination),
        }


def matrix(names: list[str], links: tuple[LinkFacts, ...], shown: Callable[[LinkFacts], str]) -> list[str]:
    """Returns the lines of a table with a row and a column for each host; "-" stands for a link that was not measured."""
    by_pair = {(link.source, link.target): shown(link) for link in links}
    rows = [["", *names]]
    for source in names:
        row = [source]
        for target in names:
            missing = "" if source == target else "-"
            row.append(by_pair.get((source, target), missing))
        rows.append(row)
    return text_table(rows, "  ", numbers=True)


def _counted(count: int, noun: str) -> str:
    plural = "" if count == 1 else "s"
    return f"{count or 'no'} {noun}{plural}"
