"""The two records that the modules of `config/` exchange: a value as it was given, and the final choice of a setting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# A longer word is no misspelled name, and comparing it would take time: the edit distance is quadratic.
_LONGEST_NAME = 200
SOURCES = ("default", "file", "environment", "command line", "code")  # the later one wins


@dataclass(frozen=True)
class Given:
    """Holds a value as it was given, before it is parsed.

    Attributes:
        name: name of a setting, or another library's name for one.
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

    @property
    def strength(self) -> int:
        """The rank of its source: the later a source stands in `SOURCES`, the stronger it is."""
        return SOURCES.index(self.source)


@dataclass(frozen=True)
class Choice:
    """Holds the final value of one setting and where it comes from; it has the same fields as a plan's `Decision`.

    Attributes:
        field: name of the setting.
        value: its value.
        source: one of `SOURCES`.
        where: the exact place; "" for a default.
        reason: which weaker value it replaces, or why the value has no effect.
    """

    field: str
    value: Any
    source: str = "default"
    where: str = ""
    reason: str = ""


def nearest(word: str, words: Iterable[str]) -> str:
    """Returns the word of `words` that `word` was probably meant to be; "" if no word is really close.

    A wrong suggestion is worse than none: `--steps` shares most letters with `--tp`, and means something else. So a
    candidate counts only if at most one letter in four is wrong, or if it begins or ends with `word` and is at most twice
    as long, such as `--mixed-precision` for `--precision`. Among these, the one with the longest common parts is returned.
    """
    from difflib import SequenceMatcher

    if len(word) > _LONGEST_NAME:
        return ""
    wanted = _plain(word)
    best = ""
    best_ratio = 0.0
    for candidate in words:
        plain = _plain(candidate)
        is_half = len(wanted) >= 4 and 2 * len(wanted) >= len(plain)
        is_beginning = is_half and plain.startswith(wanted)
        # A shorter end, such as `steps` of `save-steps`, is a word of its own.
        is_end = is_half and len(wanted) >= 8 and plain.endswith(wanted)
        is_part = is_beginning or is_end
        if not is_part and edit_distance(wanted, plain) > max(len(wanted), len(plain)) // 4:
            continue
        ratio = SequenceMatcher(None, wanted, plain).ratio()
        if ratio > best_ratio:
            best, best_ratio = candidate, ratio
    return best


def _plain(word: str) -> str:
    """Returns a name in one spelling: without leading hyphens, with underscores, in small letters."""
    return word.lstrip("-").replace("-", "_").lower()


def edit_distance(first: str, second: str) -> int:
    """Returns how many letters must be inserted, removed, replaced or swapped with a neighbour to turn one word into another.

    This is the restricted Damerau-Levenshtein distance. Of the usual table only the last three rows are in memory.
    """
    before_last: list[int] = []
    last = list(range(len(second) + 1))
    for i, letter in enumerate(first, start=1):
        row = [i]
        for j, other in enumerate(second, start=1):
            distance = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                distance = min(distance, before_last[j - 2] + 1)
            row.append(distance)
        before_last, last = last, row
    return last[-1]
