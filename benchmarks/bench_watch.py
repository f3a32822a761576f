"""What `--watch` costs: a training step on two ranks that is recorded, against one that is not; and how much is written.

    python benchmarks/bench_watch.py            as Markdown
    python benchmarks/bench_watch.py --smoke    few and short turns: that it runs

The two take turns, in alternating order, each turn in two fresh processes; what is compared are the two runs of each turn. Wall
time varies by percents on a machine that others use. So the CPU time of the process is compared too, with all its threads, and
what the recording itself takes is counted alone: the training thread's part by calling it, the thread's by its own clock.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from bench_profile import GPT
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.base.env import patched
from paceline.observe.telemetry import Progress, Telemetry
from paceline.testing import run_ranks
from paceline.watch.journal import JournalReader, JournalWriter, rank_file
from paceline.watching import resident

SHAPES = {"small": ((2, 64, 256, 16), 4), "medium": ((6, 512, 10_000, 64), 8)}


def train(shape: tuple[int, int, int, int], rows: int, seconds: float) -> tuple[float, float]:
    """Wall and CPU seconds of one step, the first ones left out."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = GPT(*shape)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    tokens = torch.randint(0, shape[2], (rows, shape[3]))

    def steps(count: int) -> None:
        for number in range(count):
            with accelerator.run.events.phase("data", None):
                batch = tokens.clone()
            loss = functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 0:
                accelerator.log({"loss": loss, "learning_rate": 1e-4})

    steps(3)
    begin = time.perf_counter()
    steps(3)
    own = max(1, round(seconds / ((time.perf_counter() - begin) / 3)))
    count = int(accelerator.collectives.broadcast_object(own))
    accelerator.wait_for_everyone()
    wall, processor = time.perf_counter(), time.process_time()
    steps(count)
    accelerator.wait_for_everyone()
    taken = (time.perf_counter() - wall) / count, (time.process_time() - processor) / count
    accelerator.end_training()
    return taken


def compare(shape: tuple[int, int, int, int], rows: int, turns: int, seconds: float) -> str:
    """A row: medians, and the median of the ratios of all turns with their quartiles."""
    wall: list[float] = []
    processor: list[float] = []
    step_s: list[float] = []
    rates: list[float] = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            taken = {}
            for watched in (True, False) if turn % 2 else (False, True):
                env = {"PACELINE_WATCH_DIR": folder} if watched else {}
                taken[watched] = run_ranks(train, world=2, args=(shape, rows, seconds), env=env, timeout_s=600)[0]
            rates.append(bytes_a_second(Path(folder)))
        step_s.append(taken[False][0])
        wall.append(taken[True][0] / taken[False][0])
        processor.append(taken[True][1] / taken[False][1])
    return f"{median(step_s) * 1e3:.2f} | {_spread(wall)} | {_spread(processor)} | {median(rates):.0f}"


def bytes_a_second(folder: Path) -> float:
    """Of rank 0, which writes the values too."""
    lines = JournalReader(folder).read()
    moments = [line.t for line in lines if line.role == "rank" and line.number == 0]
    return (folder / rank_file(0)).stat().st_size / (moments[-1] - moments[0])


def own_costs() -> tuple[float, float]:
    """Microseconds of the training thread for one change of phase, and of the other thread for one tick."""
    with tempfile.TemporaryDirectory() as folder:
        writer = JournalWriter(Path(folder) / rank_file(0))
        telemetry = Telemetry(writer, lambda: Progress(step=5, samples=640), resident, main=True)
        count = 200_000
        begin = time.thread_time()
        for _ in range(count // 2):
            telemetry.to("forward")
            telemetry.to("rest")
        change_us = (time.thread_time() - begin) / count * 1e6
        ticks = 500
        took: list[float] = []

        def tick() -> None:
            begin = time.thread_time()
            for step in range(ticks):
                telemetry.log({"loss": 1.0, "learning_rate": 1e-4}, step)
                telemetry._tick()
            took.append((time.thread_time() - begin) / ticks * 1e6)

        thread = threading.Thread(target=tick)
        thread.start()
        thread.join()
        telemetry.finish()
    return change_us, took[0]


def step_cost() -> float:
    """Microseconds of the training thread for a whole step: what a step of Linear(10, 5) takes more when it is recorded."""
    with tempfile.TemporaryDirectory() as folder:
        plain = step_of(Accelerator(cpu=True))
        with patched({"PACELINE_WATCH_DIR": folder}):
            watched_accelerator = Accelerator(cpu=True)
        watched = step_of(watched_accelerator)
        more: list[float] = []
        for turn in range(60):
            taken = {}
            for step in (plain, watched) if turn % 2 else (watched, plain):
                begin = time.thread_time()
                for _ in range(50):
                    step()
                taken[step] = (time.thread_time() - begin) / 50
            more.append(taken[watched] - taken[plain])
        watched_accelerator.end_training()
    return median(more) * 1e6


def step_of(accelerator: Accelerator) -> Callable[[], None]:
    """A step of the smallest model, as a loop takes it."""
    model = nn.Linear(10, 5)
    loader = DataLoader(TensorDataset(torch.ones(100, 10)), batch_size=100)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)

    def step() -> None:
        for (batch,) in loader:
            accelerator.backward(model(batch).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def _spread(ratios: list[float]) -> str:
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return f"{median(ordered):.3f} ({ordered[quarter]:.3f} .. {ordered[-1 - quarter]:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few and short turns")
    parser.add_argument("--turns", type=int, default=12, help="turns of each row")
    parser.add_argument(
        "--models", default=",".join(SHAPES), help="rows, joined by commas; none for the own costs alone"
    )
    args = parser.parse_args()
    turns, seconds = (2, 1.5) if args.smoke else (args.turns, 4.0)
    change_us, tick_us = own_costs()
    print(f"A change of phase: {change_us:.2f} us of the training thread; a whole step: {step_cost():.0f} us.")
    print(f"A tick, once a second: {tick_us:.0f} us of the other thread.\n")
    print("| model | step without, ms | with / without, wall | with / without, CPU | bytes a second, rank 0 |")
    print("|---|---|---|---|---|")
    for name in filter(None, args.models.split(",")):
        shape, rows = SHAPES[name]
        print(f"| {name} | {compare(shape, rows, turns, seconds)} |", flush=True)


if __name__ == "__main__":
    main()
