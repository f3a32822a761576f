"""What travels through `config/`: a value as somebody gave it (`Given`), and what became of a setting (`Choice`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_LONGEST_NAME = 200  # a longer word is a name that nobody meant
SOURCES = ("default", "file", "environment", "command line", "code")  # the later one wins


@dataclass(frozen=True)
class Given:
    """A value as it was given, still unread.

    Attributes:
        name: of a setting, or accelerate's name of one.
        value: text from a flag, a variable or a file; any object from code.
        source: one of `SOURCES`.
        where: the exact place, such as "run.yaml:12", "--tp", "PACELINE_TP" or "Accelerator(tp=...)".
    """

    name: str
    value: Any
    source: str
    where: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.where})"


@dataclass(frozen=True)
class Choice:
    """What became of one setting; the same fields as a plan's `Decision`.

    Attributes:
        field: name of the setting.
        value: its value.
        source: one of `SOURCES`.
        where: the exact place; "" for a default.
        reason: what else was said and lost, or why the value has no effect.
    """

    field: str
    value: Any
    source: str = "default"
    where: str = ""
    reason: str = ""


def nearest(word: str, words: Iterable[str]) -> str:
    """The word of `words` that `word` was probably meant to be; "" where none is close."""
    from difflib import get_close_matches

    if len(word) > _LONGEST_NAME:
        return ""
    known = {each.replace("-", "_").lower(): each for each in words}
    found = get_close_matches(word.replace("-", "_").lower(), known, n=1, cutoff=0.6)
    return known[found[0]] if found else ""
