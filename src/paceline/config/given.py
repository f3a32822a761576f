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
        name: of a setting, or another library's name of one.
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
    """The word of `words` that `word` was probably meant to be; "" where none is really close.

    A wrong suggestion costs more than none: `--steps` shares most letters with `--tp`, and means something else. So only
    those count in which one letter in four is wrong at most, or which begin or end with `word` if that is half of them or
    more, such as `--precision` for `--mixed-precision`; among them the one with the longest common parts.
    """
    from difflib import SequenceMatcher

    if len(word) > _LONGEST_NAME:
        return ""
    wanted = _plain(word)
    best, best_ratio = "", 0.0
    for candidate in words:
        plain = _plain(candidate)
        is_half = len(wanted) >= 4 and 2 * len(wanted) >= len(plain)
        is_part = is_half and plain.startswith(wanted)
        # A shorter end, such as `steps` of `save-steps`, is a word of its own.
        is_part = is_part or (is_half and len(wanted) >= 8 and plain.endswith(wanted))
        if not is_part and edit_distance(wanted, plain) > max(len(wanted), len(plain)) // 4:
            continue
        ratio = SequenceMatcher(None, wanted, plain).ratio()
        if ratio > best_ratio:
            best, best_ratio = candidate, ratio
    return best


def _plain(word: str) -> str:
    """A name without what a person may write either way: hyphens, capitals."""
    return word.lstrip("-").replace("-", "_").lower()


def edit_distance(first: str, second: str) -> int:
    """Letters to insert, remove, replace or swap with their neighbour to turn `first` into `second`.

    The restricted Damerau-Levenshtein distance, by rows of the usual table.
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
