"""Fair timing on noisy machines: the candidates take turns, and what counts is the median of the ratios of each turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """Medians over turns. `ratio` is candidate / peer, from the ratios of the single turns."""

    candidate_s: float
    peer_s: float
    ratio: float
    low: float
    high: float

    def row(self, what: str, peer: str, must: str) -> str:
        """One Markdown row: what, candidate, peer, ratio (quartiles), target."""
        return (
            f"| {what} | {_shown(self.candidate_s)} | {peer} {_shown(self.peer_s)} "
            f"| {self.ratio:.3f} ({self.low:.3f} .. {self.high:.3f}) | {must} |"
        )


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def pairs(candidate: Callable[[], float], peer: Callable[[], float], turns: int = 15) -> Result:
    """Runs both `turns` times in alternating order; each call returns its own seconds for one unit of work."""
    candidate(), peer()
    found = []
    for turn in range(turns):
        first, second = (candidate, peer) if turn % 2 == 0 else (peer, candidate)
        a, b = first(), second()
        found.append((a, b) if turn % 2 == 0 else (b, a))
    ratios = sorted(a / b for a, b in found)
    quarter = len(ratios) // 4
    return Result(
        statistics.median(a for a, _ in found),
        statistics.median(b for _, b in found),
        statistics.median(ratios),
        ratios[quarter],
        ratios[-1 - quarter],
    )


def seconds(work: Callable[[], object], units: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one unit, where `work` does `units` of them."""
    start = clock()
    work()
    return (clock() - start) / units
