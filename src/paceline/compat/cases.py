"""`Case`: one row of the tables that say what a value in another library's words comes to here.

means   {"zero": 2}            our settings and options that say the same
why     "..."                  it has no effect here, and why
fix     "..."                  it is refused; what to do instead
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.env import parse_bool


class Stands:
    """Stands for a number or a text that is known later."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


VALUE = Stands("the same")
NODES = Stands("number of hosts")


@dataclass(frozen=True)
class Case:
    """What one value of a field comes to.

    Attributes:
        value: words with | between (capitals do not matter; yes, on and 1 are true); "*" is any value.
        means: setting, or "options.strategy.option" -> value.
        why: why it has no effect, or why it is refused.
        fix: what to do instead; a case with one is refused.
        unless: it says nothing where one of these fields is given.
    """

    value: str
    means: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    fix: str = ""
    unless: tuple[str, ...] = ()


def fits(case: Case, value: object) -> bool:
    """Whether a case is about a value."""
    if case.value == "*":
        return True
    words = case.value.lower().split("|")
    if word(value) in words:
        return True
    try:
        return ("true" if parse_bool(word(value)) else "false") in words
    except ValueError:
        return False


def word(value: object) -> str:
    """A value as one small word, for comparison."""
    return str(value).strip().lower()
