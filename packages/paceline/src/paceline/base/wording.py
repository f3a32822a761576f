"""The names of calls and settings in errors and warnings, for scripts that are written with another library's names.

Errors are written once, with Paceline's own names. A script that was written for another library has no `accelerator.prepare`,
so the module that serves that library's names gives its phrases here, and every text is told in them:

    raise TrainError(..., fix="write `accelerator.backward(loss)`")   ->   fix: write `engine.backward(loss)`
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# A pattern in a text of ours -> what stands there for the script.
Phrases = Sequence[tuple[str, str]]

_phrases: list[tuple[re.Pattern[str], str]] = []


def use(phrases: Phrases) -> None:
    """Tells all texts of this process in these phrases from now on; `()` is Paceline's own wording."""
    _phrases[:] = [(re.compile(pattern), phrase) for pattern, phrase in phrases]


def worded(text: str) -> str:
    """Returns a text in the phrases of the script's library."""
    for pattern, phrase in _phrases:
        text = pattern.sub(phrase, text)
    return text


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns "rank 3", or "4 ranks (0-2, 5)"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = []
    for first, last in spans:
        texts.append(str(first) if first == last else f"{first}-{last}")
    return f"{len(ranks)} ranks ({', '.join(texts)})"
