"""How long a step takes, predicted by `paceline plan`'s model and measured, for each plan of a GPT on 2 ranks.

    python benchmarks/bench_forecast.py                  24 million parameters, one thread a rank
    python benchmarks/bench_forecast.py --size 4M        a smaller model
    python benchmarks/bench_forecast.py --only zero      plans whose name holds this

The same ranks measure the machine and train, in turns: a round of the calibration's probes, a step, and so on. The
prediction goes by the medians of the probes, and is compared with the median of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from parallel.model import gpt, loss_of
from parallel.ways import Task, Way, paceline
from timing import seconds

from paceline.planner.calibration import Calibration, Machine
from paceline.planner.measure import Probes
from paceline.planner.rehearsal import Rehearsal, SimulatedWorld, rehearse
from paceline.planner.step_time import StepTime, bubble_of, overlaps, step_time
from paceline.testing import run_ranks

RANKS = 2


def pipeline(task: Task) -> Callable[[], None]:
    """The GPT as a pipeline of `RANKS` stages."""
    from paceline import Accelerator

    accelerator = Accelerator(plan={"pp": RANKS}, cpu=True)
    model = gpt(task.size)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = task.batch()

    def step() -> None:
        optimizer.zero_grad()
        accelerator.forward_backward(model, batch, loss_of)
        optimizer.step()

    return step


WAYS: dict[str, Way] = {
    "replicate": paceline(replicate=RANKS),
    "shard, zero 1": paceline(shard=RANKS, zero=1),
    "shard, zero 2": paceline(shard=RANKS, zero=2),
    "shard, zero 3": paceline(shard=RANKS, zero=3),
    "tp": paceline(tp=RANKS),
    "pp": pipeline,
}


def rank(way: Way, task: Task, turns: int) -> tuple[Calibration, list[float]]:
    """The calibration, and seconds of steps, of this rank."""
    torch.set_num_threads(1)
    step = way(task)
    probes = Probes(torch.device("cpu"), dist.group.WORLD)
    for _ in range(3):  # buckets are arranged, states and caches made
        step()
    rounds: list[dict[str, float]] = []
    steps: list[float] = []
    for _ in range(turns):
        rounds.append(probes.round())
        step()  # the probes have emptied the caches
        dist.barrier()
        steps.append(seconds(step, 1))
    machine = Machine("", "cpu", torch.__version__, RANKS, 1)
    return probes.calibration(rounds, machine, 0.0), steps


def forecast(way: Way, task: Task, calibration: Calibration) -> tuple[Rehearsal, StepTime]:
    """What is predicted."""

    def train() -> None:
        step = way(task)
        for _ in range(5):
            step()

    seen = rehearse(train, SimulatedWorld(RANKS, RANKS))
    if seen.memory is None:
        raise RuntimeError(f"the rehearsal failed: {seen.problem}")
    return seen, step_time(seen.traffic.work, calibration, overlaps(seen.plan), bubble_of(seen.plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="", help="plans whose name holds this")
    parser.add_argument("--size", choices=("24M", "4M"), default="24M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    task = Task(options.size, options.rows, options.length)
    print(
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {options.turns} turns, medians, "
        f"GPT {options.size}, {options.rows} x {options.length} tokens a rank, {RANKS} ranks of one thread; milliseconds\n"
    )
    print("| plan | measured | predicted | error | compute | communication (hidden) | optimizer | bubble | overhead |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, way in WAYS.items():
        if options.only not in name:
            continue
        by_rank = run_ranks(rank, world=RANKS, args=(way, task, options.turns), timeout_s=900, output=[])
        calibration = by_rank[0][0]
        # A step is over when the slowest rank has ended it.
        measured = statistics.median(max(of_ranks) for of_ranks in zip(*(steps for _, steps in by_rank), strict=True))
        _, time_of = forecast(way, task, calibration)
        cells = [measured, time_of.total_s, time_of.compute_s, time_of.communication_s, time_of.hidden_s,
                 time_of.optimizer_s, time_of.bubble_s, time_of.overhead_s]  # fmt: skip
        texts = [f"{1e3 * value:.0f}" for value in cells]
        texts[3:5] = [f"{texts[3]} ({texts[4]})"]
        texts.insert(2, f"{time_of.total_s / measured - 1:+.0%}")
        print(f"| {name} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
