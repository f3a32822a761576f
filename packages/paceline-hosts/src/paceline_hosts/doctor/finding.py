"""Defines a finding, and the checks that make findings. Each check is one file in `checks/`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from paceline.base.registry import Registry
from paceline_hosts.doctor.facts import Examination

CHECKS = Registry("paceline.doctor_checks", "check")
Level = Literal["ok", "warning", "problem"]
_LISTED = 8  # how many names a sentence lists
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """Describes one thing that a check has found.

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
    """Judges the facts of an examination, without asking any host.

    Attributes:
        name: name of the check in the table.
        judge: examination -> its findings, at least one if there is something to judge.
    """

    name: str
    judge: Callable[[Examination], list[Finding]]


def where_all(examination: Examination) -> str:
    """Returns the `where` of a finding about all hosts that answered; with one host, its name."""
    names = list(examination.facts)
    return names[0] if len(names) == 1 else "all hosts"


def on(host: str, examination: Examination, command: str) -> str:
    """Returns a command as a fix; with several hosts, it names the host to run it on."""
    return f"`{command}`" if len(examination.hosts) == 1 else f"on {host}: `{command}`"


def leave_out(host: str) -> str:
    """Returns the fix for a host that somebody has to repair first: start the run without it."""
    return f"start without it until it is repaired: `--exclude {host}`"


def listed(names: Iterable[str]) -> str:
    """Joins names for a sentence; of many names, it lists the first ones and counts the others."""
    every = list(names)
    if len(every) > _LISTED:
        return f"{', '.join(every[:_LISTED])} and {len(every) - _LISTED} more"
    return ", ".join(every)
