"""`Case`: a row of the tables that translate another library's values into Paceline's settings.

means   {"zero": 2}            Paceline's settings and options with the same meaning
why     "..."                  the reason why the value has no effect here
fix     "..."                  the value is refused; this is what to do instead

The tables of accelerate's engines and of DeepSpeed's config are made of such rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.base.env import parse_bool


class Placeholder:
    """Stands in a table for a value that is known later; `text` is what the docs show for it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


VALUE = Placeholder("the same")
NODES = Placeholder("number of hosts")


@dataclass(frozen=True)
class Case:
    """The meaning of one value of a field.

    Attributes:
        value: words separated by | (in any case; yes, on and 1 are true); "*" is any value.
        means: setting, or "options.strategy.option" -> value.
        why: why the value has no effect, or is refused.
        fix: what to do instead; a case that has this text is refused.
        unless: fields; if one of them is given, this case gives no settings.
    """

    value: str
    means: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    fix: str = ""
    unless: tuple[str, ...] = ()


def fits(case: Case, value: object) -> bool:
    """Whether a value is one of a case's."""
    if case.value == "*":
        return True
    words = case.value.lower().split("|")
    text = word(value)
    if text in words:
        return True
    # A table says only "true" or "false", and a file or a variable may say "yes", "on" or "1".
    try:
        is_true = parse_bool(text)
    except ValueError:
        return False
    if is_true:
        return "true" in words
    return "false" in words


def word(value: object) -> str:
    """Returns the text of a value in lower case and without blanks around it, for comparison."""
    return str(value).strip().lower()
