"""Runs the script in each process of a drill: `python -m paceline_lens.rehearse.job_in_drill DRILL.json script.py [arguments]`.

It writes down when each part of the start is over, each step with its loss, and each save; and it strikes at the step that the
drill names. Nothing that the script computes is changed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch

from paceline.base import env as environment
from paceline.launch.job import Target
from paceline.launch.worker.worker import become
from paceline.run.run import Run
from paceline.world import runtime
from paceline.world.events import SavedCheckpoint
from paceline.world.runtime import Runtime
from paceline_lens.faults import Fault
from paceline_lens.observe.watching import progress_of
from paceline_lens.rehearse.apart import keep_apart
from paceline_lens.rehearse.lines import DrillOrders, LineWriter


class DrilledRank(Runtime):
    """Records what one process does, and strikes.

    Args:
        orders: of the drill.
        rank: of this process.
    """

    tracks = False

    def __init__(self, orders: DrillOrders, rank: int) -> None:
        self._lines = LineWriter(Path(orders.folder), rank)
        self._rank = rank
        self._run: Run  # known once it begins
        self._step = -1  # the last one that was written down; -1 before the first batch
        self._losses: list[torch.Tensor] = []
        self._fault: Fault | None = None
        if orders.strike:
            kind = cast(Literal["kill", "stop", "preempt", "kill-launcher"], orders.strike)
            self._fault = Fault(kind, orders.rank, orders.step, once=Path(orders.folder) / "struck")

    def run(self, target: Target, compat: str) -> None:
        """Runs the script in this process to its end."""
        runtime.use(self)
        self._lines.write("ready", born=born())
        become(target.on(environment.get("LOCAL_RANK") or 0), compat)
        self._lines.write("over")

    # -- what happens in the run -----------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        self._run = run
        run.events.preparing.subscribe(lambda _: self._lines.write("preparing"))
        run.events.prepared.subscribe(lambda _: self._lines.write("prepared"))
        run.events.backward.subscribe(self._backward)
        run.events.stepped.subscribe(self._stepped)
        run.events.saved.subscribe(self._saved)

    def batches(self, steps: Iterator[Any]) -> Iterator[Any]:
        self._note_loop()
        return steps

    def _backward(self, loss: torch.Tensor, scaled: torch.Tensor, num_items: object) -> None:
        self._note_loop()
        # A copy, because the script may change its loss in place.
        self._losses.append(scaled.detach().sum().double())
        if self._fault is not None and self._fault.due("step", self._step, self._rank):
            self._lines.write("strikes", step=self._step)
            self._fault.at(self._step, self._rank)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        progress = progress_of(self._run)
        # With several optimizers, the step is over for the one that is the furthest.
        if progress.step == self._step:
            return
        self._step = progress.step
        loss = float(sum(self._losses)).hex() if self._losses else None
        self._losses.clear()
        self._lines.write("step", step=progress.step, samples=progress.samples, loss=loss)

    def _note_loop(self) -> None:
        """Writes down once that the training begins, and from which step."""
        if self._step < 0:
            self._step = progress_of(self._run).step
            self._lines.write("loop", step=self._step)

    def _saved(self, checkpoint: SavedCheckpoint) -> None:
        self._lines.write("saved", **asdict(checkpoint))


def born() -> float:
    """Returns when this process was started, in seconds since the epoch; now, where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def main(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Runs the script as the file of the drill says."""
    orders = DrillOrders.read(words[0])
    if orders.checkpoints:
        keep_apart(Path(orders.checkpoints))
    kind = cast(Literal["script", "module"], orders.kind)
    target = Target(kind, words[1], tuple(words[2:]))
    rank = environment.get("RANK") or 0
    DrilledRank(orders, rank).run(target, variables.get("PACELINE_COMPAT", ""))


if __name__ == "__main__":
    main(sys.argv[1:], environment.snapshot())
