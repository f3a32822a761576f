"""How long a step takes, predicted by `paceline plan`'s model and measured, for each plan of a GPT on 2 ranks.

    python benchmarks/bench_forecast.py                  24 million parameters, one thread a rank
    python benchmarks/bench_forecast.py --size 4M        a smaller model: 4 blocks of width 256
    python benchmarks/bench_forecast.py --only zero      plans whose name holds this
    python benchmarks/bench_forecast.py --clock cpu      processor time of a rank, where other programs use the machine

The same ranks measure the machine and train, in turns: a round of the calibration's probes, a step, and so on. The
prediction goes by the medians of the probes, and is compared with the median of the steps. A second row has the fastest of
each, which other programs of the machine disturb least.

Time in which a rank waits is no processor time. So with `--clock cpu` the measured step of a pipeline is what its schedule
takes when it is played with the processor time of each forward and backward pass, as measured on the rank of its stage.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parallel.model import gpt, loss_of
from parallel.ways import Task, Way, paceline
from timing import seconds

from paceline.parallel.strategy import timetable_of
from paceline.testing import run_ranks
from paceline_large.pipeline.timetable import simulate
from paceline_large.pipeline.timing import Meter, measure
from paceline_lens.forecast.calibration import Calibration, Machine
from paceline_lens.forecast.measure import Probes
from paceline_lens.forecast.rehearsal import Rehearsal, SimulatedWorld, rehearse
from paceline_lens.forecast.step_time import StepTime, beside_computing, step_time

RANKS = 2


class Lengths(Meter):
    """Seconds of each forward and backward pass of this rank, in the order of its schedule."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self.seconds: list[float] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Takes the time of one pass."""
        began = self._clock()
        yield
        self.seconds.append(self._clock() - began)


class PipelineStep:
    """One step of the GPT as a pipeline of `RANKS` stages, or of a multiple of that."""

    def __init__(self, task: Task, options: Mapping[str, Any]) -> None:
        from paceline import Accelerator

        self._accelerator = Accelerator(plan={"pp": RANKS}, cpu=True, options={"pipeline": options})
        model = gpt(task.size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)
        self._batch = task.batch()

    def __call__(self) -> None:
        """Forward and backward passes of all micro-batches, and the optimizer's step."""
        self._optimizer.zero_grad()
        self._accelerator.forward_backward(self._model, self._batch, loss_of)
        self._optimizer.step()

    def with_lengths(self, lengths: Lengths) -> None:
        """A step whose passes are timed."""
        with measure(self._model):
            pipe: Any = next(module.forward.pipe for module in self._model.modules() if hasattr(module.forward, "pipe"))
            pipe.meter = lengths
            self()


def pipeline(**options: Any) -> Way:
    """What a user of Paceline writes for a pipeline, with options of it."""
    return lambda task: PipelineStep(task, options)


WAYS: dict[str, Way] = {
    "replicate": paceline(replicate=RANKS),
    "shard, zero 1": paceline(shard=RANKS, zero=1),
    "shard, zero 2": paceline(shard=RANKS, zero=2),
    "shard, zero 3": paceline(shard=RANKS, zero=3),
    "tp": paceline(tp=RANKS),
    "pp": pipeline(),
    "pp, gpipe of 4": pipeline(schedule="gpipe", microbatches=4),
    "pp, 1f1b of 2": pipeline(microbatches=2),
    "pp, interleaved": pipeline(schedule="interleaved"),
}


@dataclass(frozen=True)
class Measured:
    """One or several turns.

    Attributes:
        calibration: what the probes said.
        step_s: seconds of a step on its slowest rank; of a pipeline's rank 0, less its passes.
        lengths: rank -> seconds of each pass of a pipeline; empty without one.
    """

    calibration: Calibration
    step_s: float
    lengths: Sequence[Sequence[float]] = ()


def rank(way: Way, task: Task, turns: int, clock: Callable[[], float]) -> list[Measured]:
    """By medians, by the fastest of all turns, and of each turn."""
    torch.set_num_threads(1)
    step = way(task)
    probes = Probes(torch.device("cpu"), dist.group.WORLD, clock)
    for _ in range(3):  # buckets are arranged, states and caches made
        step()
    is_played = clock is time.process_time and isinstance(step, PipelineStep)
    rounds: list[dict[str, float]] = []
    steps: list[float] = []
    passes: list[list[list[float]]] = []
    for _ in range(turns):
        rounds.append(probes.round())
        step()  # the probes have emptied the caches
        dist.barrier()
        if is_played:
            lengths = Lengths(clock)
            whole_s = seconds(partial(step.with_lengths, lengths), 1, clock)
            of_ranks: list[Any] = [None] * RANKS
            dist.all_gather_object(of_ranks, lengths.seconds)
            passes.append(of_ranks)
            steps.append(whole_s - sum(lengths.seconds))
            continue
        slowest = torch.tensor([seconds(step, 1, clock)])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        steps.append(float(slowest))
    machine = Machine("", "cpu", torch.__version__, RANKS, 1)

    def picked(pick: Callable[[Sequence[float]], float], turn: slice = slice(None)) -> Measured:
        calibration = probes.calibration(rounds[turn], machine, 0.0, pick)
        picked_passes = []
        for of_rank in zip(*passes[turn], strict=True):
            picked_passes.append([pick(of_pass) for of_pass in zip(*of_rank, strict=True)])
        return Measured(calibration, pick(steps[turn]), picked_passes)

    return [picked(statistics.median), picked(min), *(picked(min, slice(turn, turn + 1)) for turn in range(turns))]


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


def forecast(rehearsal: Rehearsal, calibration: Calibration) -> StepTime:
    """What is predicted."""
    plan = rehearsal.plan
    return step_time(
        rehearsal.work,
        calibration,
        beside_computing(plan, calibration),
        timetable_of(plan, rehearsal.models),
        max(1, plan.accumulate),
    )


def measured_s(rehearsal: Rehearsal, measured: Measured) -> float:
    """Seconds of the step; the schedule of a pipeline is played with the lengths of its passes."""
    timetable = timetable_of(rehearsal.plan, rehearsal.models)
    if timetable is None or not measured.lengths:
        return measured.step_s
    of_action: dict[tuple[str, int], list[float]] = {}
    for rank, lengths in enumerate(measured.lengths):
        for (op, stage, _), length in zip(timetable.order[rank], lengths, strict=True):
            of_action.setdefault((op, stage), []).append(length)
    played = simulate(timetable.order, lambda op, stage: statistics.median(of_action[op, stage]))
    return measured.step_s + played.length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="", help="plans whose name holds this")
    parser.add_argument("--size", choices=("24M", "4M"), default="24M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    options = parser.parse_args()
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
        for by, measured in zip(("median", "fastest"), results[:2], strict=True):
            predicted = forecast(rehearsal, measured.calibration)
            print(_row(name, by, measured_s(rehearsal, measured), predicted), flush=True)
        errors: list[float] = []
        for measured in results[2:]:
            predicted = forecast(rehearsal, measured.calibration)
            errors.append(predicted.total_s / measured_s(rehearsal, measured) - 1)
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
