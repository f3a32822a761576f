"""Lines of the journal of a run, with the times that each rank spends in each phase, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline_lens.watch.journal import JournalLine, RunHeader
from paceline_lens.watch.records import Hello, JournalRecord, Tick
from paceline_lens.watch.view import RunView

STARTED = 1_800_000_000.0
EVEN = {"data": 4.0, "forward": 60.0, "backward": 120.0, "reduce": 30.0, "clip": 4.0, "step": 20.0, "rest": 12.0}


class WatchedRun:
    """A run that goes on second by second; `view` has taken all of it.

    Args:
        ranks: how many there are, two on each host.
    """

    def __init__(self, ranks: int = 4, **header: Any) -> None:
        self.ranks = ranks
        self.now = STARTED
        self.step = 0
        self.view = RunView(RunHeader(name="toy", script="train.py", started=STARTED, procs=ranks, **header))

    def add(self, record: JournalRecord, rank: int = 0, role: str = "rank") -> None:
        """A line of this moment."""
        self.view.add(JournalLine(role, rank, self.now, record))

    def hello(self, restart: int = 0, **facts: Any) -> None:
        """All ranks start."""
        for rank in range(self.ranks):
            node, local_rank = divmod(rank, 2)
            self.add(Hello(rank, node, f"node{node + 1}", local_rank, 5000 + rank, "cpu", restart, **facts), rank)

    def train(
        self,
        seconds: int,
        ms: Mapping[str, float] = EVEN,
        others: Mapping[int, Mapping[str, float]] | None = None,
        ticks: Mapping[int, Mapping[str, Any]] | None = None,
        silent: tuple[int, ...] = (),
        **tick: Any,
    ) -> None:
        """Steps go on.

        Args:
            ms: what each phase of a step takes on a rank; the steps of a second follow from it.
            others: ranks for which it differs.
            ticks: ranks -> fields of their ticks that differ.
            silent: ranks that write nothing.
            tick: fields of all ticks.
        """
        steps = round(1000 / sum(ms.values()))
        for _ in range(seconds):
            self.now += 1
            self.step += steps
            for rank in range(self.ranks):
                spent = {phase: steps * value for phase, value in ((others or {}).get(rank) or ms).items()}
                line = Tick(
                    self.step, 10_000, self.step * 64, ms=spent, steps=steps, phase="backward", phase_s=0.1, **tick
                )
                if rank not in silent:
                    self.add(replace(line, **(ticks or {}).get(rank, {})), rank)

    def stand(
        self,
        seconds: int,
        phases: Mapping[int, str],
        silent: tuple[int, ...] = (),
        steps: Mapping[int, int] | None = None,
        waits: tuple[int, ...] = (),
    ) -> None:
        """No step ends: each rank stays in a phase. Those of `waits` are seen inside of a collective."""
        for second in range(1, seconds + 1):
            self.now += 1
            for rank, phase in phases.items():
                at = f"{phase}.py:7" if second > 5 else ""
                step = (steps or {}).get(rank, self.step)
                tick = Tick(step, 10_000, phase=phase, phase_s=float(second), ms={phase: 1000.0}, at=at)
                if rank in waits:
                    tick = replace(tick, waits={phase: 950.0})
                if rank not in silent:
                    self.add(tick, rank)

    def snapshot(self, **options: Any) -> dict[str, Any]:
        """Of this moment."""
        return self.view.snapshot(self.now, **options)

    def kinds(self) -> list[str]:
        """Of the findings of this moment."""
        return [finding["kind"] for finding in self.snapshot()["findings"]]


def moved(
    phase: str, extra: float, wait: str = "reduce", ms: Mapping[str, float] = EVEN
) -> tuple[dict[str, float], dict[str, float]]:
    """What a step takes on a rank that is `extra` ms slower in a phase, and on the others, which wait for it in `wait`."""
    slow = {**ms, phase: ms.get(phase, 0.0) + extra}
    others = {**ms, wait: ms.get(wait, 0.0) + extra}
    return slow, others
