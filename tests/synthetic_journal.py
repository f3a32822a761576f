"""Writes the journal of a run that never was, with the same lines each time, for tests of what reads journals."""

from __future__ import annotations

import math
from pathlib import Path

from paceline_lens.watch.journal import JournalWriter, RunHeader, launcher_file, rank_file, write_header
from paceline_lens.watch.records import (
    AnomalyFound,
    CheckpointSaved,
    ErrorShown,
    Hello,
    JournalRecord,
    LauncherEnded,
    PlanMade,
    RoundStarted,
    Stuck,
    Tick,
    ValuesLogged,
)

STARTED = 1_800_000_000.0
_STEP_MS = {"data": 8.0, "forward": 60.0, "backward": 120.0, "reduce": 30.0, "clip": 4.0, "step": 20.0, "rest": 8.0}


def write_synthetic(
    folder: Path,
    ranks: int = 4,
    seconds: int = 60,
    *,
    nodes: int = 2,
    slow_rank: int | None = 3,
    slow_phase: str = "data",
    restart_at: int | None = None,
    stuck_at: int | None = None,
    checkpoint_every: int = 20,
    nan_at: int | None = None,
    names: int = 2,
    exit_code: int | None = 0,
    started: float = STARTED,
) -> Path:
    """Writes a run of 4 steps a second and a rank, and returns the folder of its journal.

    Args:
        slow_rank: spends 41 % of its step in `slow_phase`; the others wait for it in "reduce". None for no such rank.
        restart_at: second at which node 1 is lost and comes back.
        stuck_at: second from which no step ends.
        nan_at: second at which the loss is NaN.
        names: how many values are logged at each step, "loss" and "learning_rate" the first.
        exit_code: of the launcher; None leaves the run going.
    """
    header = RunHeader(
        name="synthetic", command=["paceline", "launch", "--watch", "train.py"], script="train.py", host="node1",
        pid=4242, started=started, procs=ranks, nodes=nodes,
    )  # fmt: skip
    write_header(folder, header)
    launcher = _Lines(folder / launcher_file(0), started)
    launcher.add(0.0, RoundStarted(number=0, procs=ranks, nodes=nodes))
    files = [_Lines(folder / rank_file(rank), started) for rank in range(ranks)]
    for rank, file in enumerate(files):
        file.add(0.5, _hello(rank, ranks, nodes, 0))
    files[0].add(0.9, _plan(ranks))
    last = seconds if stuck_at is None else min(stuck_at, seconds)
    for second in range(1, seconds + 1):
        if second == restart_at:
            why = "node2 does not answer"
            launcher.add(second - 0.9, RoundStarted(1, ranks, nodes, 1, why, joined=["node2"], lost=["node2"]))
            for rank, file in enumerate(files):
                file.add(second - 0.5, _hello(rank, ranks, nodes, 1))
        for rank, file in enumerate(files):
            tick = _tick(rank, second, seconds, rank == slow_rank, slow_phase, slow_rank is not None)
            file.add(second, tick if second <= last else _waiting(tick, last, second, rank == slow_rank, slow_phase))
        if second <= last:
            files[0].add(second + 0.1, _values(second, names, second == nan_at))
        if second == nan_at:
            files[0].add(
                second + 0.2, AnomalyFound(4 * second, "nan", math.nan, None, "skip", "The loss is not a number.")
            )
        if second % checkpoint_every == 0 and second <= last:
            path = f"checkpoints/step-{4 * second}"
            files[0].add(second + 0.3, CheckpointSaved(4 * second, path, 1_500_000_000, 0.2, 3.1))
    if stuck_at is not None and seconds > stuck_at + 5:
        text = f"{ranks - 1} ranks in all_reduce at train.py:88\nrank {slow_rank} in __next__ at data.py:41"
        launcher.add(stuck_at + 6, Stuck(text, "stuck.txt", [] if slow_rank is None else [slow_rank]))
    if exit_code:
        text = "ValueError: a batch is empty\n  at train.py:31"
        launcher.add(seconds + 0.5, ErrorShown(1, "node1", "worker-failed", text))
    if exit_code is not None:
        launcher.add(seconds + 1, LauncherEnded(exit_code, "" if exit_code == 0 else "rank 1 failed with exit code 1."))
    for file in (launcher, *files):
        file.writer.close()
    return folder


class _Lines:
    """A file, written with moments since the start of the run."""

    def __init__(self, path: Path, started: float) -> None:
        self.writer = JournalWriter(path)
        self._started = started

    def add(self, second: float, record: JournalRecord) -> None:
        self.writer.append(record, self._started + second)


def _hello(rank: int, ranks: int, nodes: int, restart: int) -> Hello:
    each = max(1, ranks // nodes)
    node = rank // each
    return Hello(
        rank, node, f"node{node + 1}", rank % each, 5000 + rank, f"cuda:{rank % each} NVIDIA H200", restart, 9.9e14, 141 << 30
    )  # fmt: skip


def _plan(ranks: int) -> PlanMade:
    reasons = [["dp", str(ranks), "default", "all processes that no other axis takes"], ["shard", "2", "--shard", ""]]
    return PlanMade(f"plan: dp={ranks} shard=2", reasons, 230.0, 60 << 30, 1.2e14, True)


def _tick(rank: int, second: int, seconds: int, slow: bool, phase: str, held_up: bool) -> Tick:
    ms = {name: 4 * duration for name, duration in _STEP_MS.items()}
    if held_up and slow:
        lost = 410.0 - ms.get(phase, 0.0)
        scale = (1000.0 - 410.0) / (1000.0 - ms.get(phase, 0.0))
        ms = {name: duration * scale for name, duration in ms.items()}
        ms[phase] = 410.0
    elif held_up:
        lost = 378.0
        ms = {name: duration * (1 - lost / 1000.0) for name, duration in ms.items()}
        ms["reduce"] += lost
    return Tick(
        step=4 * second, total=4 * seconds, samples=4 * second * 64, tokens=4 * second * 64 * 1024, phase="backward",
        phase_s=0.01, ms=ms, steps=4, memory=(40 + rank) << 30, memory_peak=(58 + rank) << 30,
    )  # fmt: skip


def _waiting(tick: Tick, last: int, second: int, slow: bool, phase: str) -> Tick:
    now = phase if slow else "reduce"
    waited = float(second - last)
    at = ("data.py:41" if slow else "train.py:88") if waited > 5 else ""
    return Tick(
        step=4 * last, total=tick.total, samples=4 * last * 64, tokens=4 * last * 64 * 1024, phase=now, phase_s=waited,
        ms={now: 1000.0}, steps=0, memory=tick.memory, memory_peak=tick.memory_peak, at=at,
    )  # fmt: skip


def _values(second: int, names: int, broken: bool) -> ValuesLogged:
    step = 4 * second
    values = {"loss": math.nan if broken else 4.0 * math.exp(-second / 40) + 1.0, "learning_rate": 3e-4}
    values |= {f"value {number}": float(number) for number in range(2, names)}
    values |= {"grad_norm": 1.0 + 0.1 * math.sin(second), "loss_scale": 65536.0, "skipped_steps": 0.0}
    return ValuesLogged(step, values)
