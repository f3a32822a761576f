"""`VerifyCase`: one run that a verification compares with one process, and how the command line writes cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class VerifyCase:
    """A number of processes and a plan that are compared with one process.

    Attributes:
        procs: the number of processes.
        settings: the settings of the plan.
        plain: the name of the script from before, if the case compares with that; "" if not.
    """

    procs: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    plain: str = ""

    @property
    def name(self) -> str:
        """As the tables show it."""
        if self.plain:
            return f"beside {self.plain}"
        plan = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        processes = f"{self.procs} process{'es' * (self.procs > 1)}"
        return f"{plan}, {processes}" if plan else processes


class RunFailed(Exception):
    """A run ended such that it cannot be compared; the text says why."""


def cases_of(procs: Sequence[int], plans: Sequence[str]) -> list[VerifyCase]:
    """One case for each width, and one for each plan at the largest width that it can have.

    Args:
        plans: each one or more settings joined by `+`, such as "zero=2" or "shard=2+tp=2".
    """
    widths = sorted({width for width in procs if width > 1})
    cases = [VerifyCase(width) for width in widths]
    for plan in plans:
        settings = _settings_of(plan)
        cases += [VerifyCase(width, settings) for width in widths]
    return cases


def _settings_of(plan: str) -> dict[str, object]:
    """Returns the settings of a plan that is written as "shard=2+tp=2"; numbers are numbers."""
    settings: dict[str, object] = {}
    for pair in plan.split("+"):
        name, _, value = pair.partition("=")
        settings[name] = value
        if value.lstrip("-").isdigit():
            settings[name] = int(value)
    return settings
