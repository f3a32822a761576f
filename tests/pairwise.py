"""Pairs in the place of products: each value of a parameter beside each value of another one, in as few cases as that takes.

Most faults of a product of parameters show with two of them (Kuhn, Wallace and Gallo, "Software fault interactions and
implications for software testing", 2004). The other cases of the product run at night.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def pairs_by_day(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Returns the cases as parameters of a test, those marked `long` whose pairs of values are in the others, too."""
    cases = list(cases)
    pairs_of = [set(combinations(enumerate(map(repr, case)), 2)) for case in cases]
    missing = set().union(*pairs_of)
    by_day: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs_of[number] & missing))
        by_day.add(best)
        missing -= pairs_of[best]
    return [
        pytest.param(*case, marks=() if number in by_day else pytest.mark.long) for number, case in enumerate(cases)
    ]
