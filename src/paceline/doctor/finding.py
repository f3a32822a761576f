"""The noun of a judgement: a finding, and the checks that make findings, one file each in `checks/`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.base.registry import Registry
from paceline.doctor.facts import Examination

CHECKS = Registry("paceline.doctor.checks", "CHECK", "paceline.doctor_checks")
Level = Literal["ok", "warning", "problem"]
_LISTED = 8
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        level: "problem" for what stops a run or makes its results doubtful, "warning" for what slows it down or may stop it.
        code: its stable name; docs/how-to/doctor.md has a line for each.
        where: the host, "HOST -> HOST" for a pair, or "all hosts".
        what: what was found, with its values.
        fix: one thing to do that works; "" only where the level is "ok".
    """

    level: Level
    code: str
    where: str
    what: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert (self.level == "ok") == (not self.fix), f"{self.code}: a fix belongs to each warning and problem"


@dataclass(frozen=True)
class Check:
    """A pure judgement over the facts.

    Attributes:
        name: the row of the table.
        judge: gives at least one finding where there is something to judge.
    """

    name: str
    judge: Callable[[Examination], list[Finding]]


def where_all(examination: Examination) -> str:
    """What stands for all hosts that answered."""
    names = list(examination.facts)
    return names[0] if len(names) == 1 else "all hosts"


def on(host: str, examination: Examination, command: str) -> str:
    """A command as a fix: with its host, where there are several."""
    return f"`{command}`" if len(examination.hosts) == 1 else f"on {host}: `{command}`"


def leave_out(host: str) -> str:
    """The fix for a host that has to be mended by somebody's hands: the run goes on without it."""
    return f"start without it until it is mended: `--exclude {host}`"


def listed(names: Iterable[str]) -> str:
    """Names for a sentence; of many, the first ones and their number."""
    every = list(names)
    if len(every) > _LISTED:
        return f"{', '.join(every[:_LISTED])} and {len(every) - _LISTED} more"
    return ", ".join(every)
