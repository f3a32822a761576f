"""How long a step takes, predicted by `paceline plan`'s model and measured, for each plan of a GPT on 2 ranks.

    python benchmarks/bench_forecast.py                  24 million parameters, one thread a rank
    python benchmarks/bench_forecast.py --size 4M        a smaller model
    python benchmarks/bench_forecast.py --only zero      plans whose name holds this
    python benchmarks/bench_forecast.py --clock cpu      processor time of a rank, where other programs use the machine

The same ranks measure the machine and train, in turns: a round of the calibration's probes, a step, and so on. The
prediction goes by the medians of the probes, and is compared with the median of the steps. A second row has the fastest of
each, which other programs of the machine disturb least.
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


def rank(way: Way, task: Task, turns: int, clock: Callable[[], float]) -> list[tuple[Calibration, float]]:
    """By medians, by the fastest of all turns, and of each turn: the calibration, and the seconds of a step's slowest rank."""
    torch.set_num_threads(1)
    step = way(task)
    probes = Probes(torch.device("cpu"), dist.group.WORLD, clock)
    for _ in range(3):  # buckets are arranged, states and caches made
        step()
    rounds: list[dict[str, float]] = []
    steps: list[float] = []
    for _ in range(turns):
        rounds.append(probes.round())
        step()  # the probes have emptied the caches
        dist.barrier()
        slowest = torch.tensor([seconds(step, 1, clock)])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        steps.append(float(slowest))
    machine = Machine("", "cpu", torch.__version__, RANKS, 1)
    results: list[tuple[Calibration, float]] = []
    for pick in (statistics.median, min):
        results.append((probes.calibration(rounds, machine, 0.0, pick), pick(steps)))
    for measured_round, step_s in zip(rounds, steps, strict=True):
        results.append((probes.calibration([measured_round], machine, 0.0, min), step_s))
    return results


def rehearsed(way: Way, task: Task) -> Rehearsal:
    """What a step of rank 0 does."""

    def train() -> None:
        step = way(task)
        for _ in range(5):
            step()

    rehearsal = rehearse(train, SimulatedWorld(RANKS, RANKS))
    if rehearsal.memory is None:
        raise RuntimeError(f"the rehearsal failed: {rehearsal.problem}")
    return rehearsal


def forecast(rehearsal: Rehearsal, calibration: Calibration, *, waits: bool) -> StepTime:
    """What is predicted, with or without the time that a pipeline's ranks wait."""
    plan = rehearsal.plan
    bubble = bubble_of(plan) if waits else 0.0
    return step_time(rehearsal.traffic.work, calibration, overlaps(plan), bubble)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="", help="plans whose name holds this")
    parser.add_argument("--size", choices=("24M", "4M"), default="24M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
    # Time in which a rank waits is no processor time.
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    task = Task(options.size, options.rows, options.length)
    print(
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {options.turns} turns, medians, "
        f"GPT {options.size}, {options.rows} x {options.length} tokens a rank, {RANKS} ranks of one thread; "
        f"milliseconds, {options.clock} clock\n"
    )
    print(
        "| plan | by | measured | predicted | error | compute | communication (hidden) | optimizer | bubble | overhead |"
    )
    print(f"|{' --- |' * 10}")
    for name, way in WAYS.items():
        if options.only not in name:
            continue
        results = run_ranks(rank, world=RANKS, args=(way, task, options.turns, clock), timeout_s=900, output=[])[0]
        rehearsal = rehearsed(way, task)
        waits = options.clock == "wall"
        for by, (calibration, measured) in zip(("median", "fastest"), results[:2], strict=True):
            print(_row(name, by, measured, forecast(rehearsal, calibration, waits=waits)), flush=True)
        errors = [
            forecast(rehearsal, calibration, waits=waits).total_s / measured - 1
            for calibration, measured in results[2:]
        ]
        lower, middle, upper = statistics.quantiles(errors)
        print(f"| {name} | turn by turn | | | {middle:+.0%} ({lower:+.0%} .. {upper:+.0%}) |{' |' * 5}", flush=True)


def _row(name: str, by: str, measured: float, predicted: StepTime) -> str:
    """One Markdown row, in milliseconds."""

    def ms(of_step: float) -> str:
        return f"{1e3 * of_step:.0f}"

    error = f"{predicted.total_s / measured - 1:+.0%}"
    sending = f"{ms(predicted.communication_s)} ({ms(predicted.hidden_s)})"
    cells = [name, by, ms(measured), ms(predicted.total_s), error, ms(predicted.compute_s), sending,
             ms(predicted.optimizer_s), ms(predicted.bubble_s), ms(predicted.overhead_s)]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
