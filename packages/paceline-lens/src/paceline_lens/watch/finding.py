"""`RunFinding` is a sentence about a run with its evidence. The functions format ranks, times and sizes for such sentences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LEVELS = ("error", "warning", "note")
_NAMED_RANKS = 6


@dataclass(frozen=True)
class RunFinding:
    """What is wrong with a run, in words; the docstring of `findings.py` explains the fields."""

    kind: str
    level: str
    text: str
    fix: str = ""
    ranks: list[int] = field(default_factory=list)
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    stops: bool = False


def named(rows: Sequence[Mapping[str, Any]], snapshot: Mapping[str, Any]) -> str:
    """Names ranks: "rank 3 on node2", "ranks 1 and 3". The host is named if the run has several and all ranks are on one."""
    ranks = numbered([row["rank"] for row in rows])
    hosts = {row["host"] for row in rows}
    several_hosts = len(snapshot["world"]["hosts"]) > 1
    if not several_hosts or len(hosts) > 1 or "" in hosts:
        return ranks
    return f"{ranks} on {hosts.pop()}"


def numbered(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 1 and 3", "ranks 1, 2, 3, 4, 5, 6 and 8 others"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    words = [str(rank) for rank in ranks[:_NAMED_RANKS]]
    rest = len(ranks) - _NAMED_RANKS
    if rest > 0:
        words.append(f"{rest} others")
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def capital(text: str) -> str:
    """A text that begins a sentence."""
    return text[:1].upper() + text[1:]


def counted(number: int) -> str:
    """ "1 rank", "3 ranks"."""
    return f"{number} rank{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """ "42 s", "12 min", "3.5 h"."""
    if seconds < 180:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(number: float) -> str:
    """ "1.5 GB", "340 MB"."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def milliseconds(ms: float) -> str:
    """ "0.4 ms", "120 ms", "2.5 s"."""
    if ms < 10:
        return f"{ms:.1f} ms"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"


def median(values: Iterable[float]) -> float:
    """Returns the median; 0 if there are no values."""
    listed = list(values)
    return statistics.median(listed) if listed else 0.0
