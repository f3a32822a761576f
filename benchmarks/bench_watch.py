"""What `--watch` costs: a training step that is recorded against one that is not, on one process and on two ranks.

    python benchmarks/bench_watch.py            as Markdown
    python benchmarks/bench_watch.py --smoke    few steps: that it runs

Both live in the same processes and take turns, step by step, in alternating order. What counts is the 10th percentile of the
steps, by the wall clock and by the CPU time of the training thread: other programs disturb it least. What the writing thread
takes is read from its own clock: it runs during all steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from types import FrameType
from typing import Any

import torch
from bench_profile import GPT
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.base.env import patched
from paceline.testing import run_ranks
from paceline_lens.watch.journal import JournalReader, rank_file

# Blocks, width, vocabulary and length of a GPT, and rows of a batch: steps of about 1, 5 and 30 ms on one thread.
SHAPES: dict[str, tuple[tuple[int, int, int, int], int] | None] = {
    "Linear(10, 5)": None,
    "GPT, 20 thousand": ((1, 32, 64, 8), 1),
    "GPT, 130 thousand": ((2, 64, 256, 32), 4),
    "GPT, 1.1 million": ((4, 128, 1000, 64), 4),
}
SECONDS = 12.0
FEWEST, MOST = 100, 2500  # steps of each kind


def steps_of(accelerator: Accelerator, name: str) -> Iterator[None]:
    """A training loop, as a script has it; each `next` takes one step."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    if shape is None:
        model: nn.Module = nn.Linear(10, 5)
        data, rows = torch.ones(6400, 10), 100
    else:
        (_, _, vocabulary, length), rows = shape
        model = GPT(*shape[0])
        data = torch.randint(0, vocabulary, (64 * rows, length))
    loader = DataLoader(TensorDataset(data), batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)
    while True:
        for (batch,) in loader:
            output = model(batch)
            loss = output.sum() if shape is None else functional.cross_entropy(output.flatten(0, 1), batch.flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield


def measure(folder: str, name: str, seconds: float) -> dict[str, Any]:
    """Wall and CPU seconds of each step, not recorded and recorded. Ranks: all, each for itself."""
    torch.set_num_threads(1)
    plain = Accelerator(cpu=True)
    plain_steps = steps_of(plain, name)
    calls = calls_of(plain_steps)
    with patched({"PACELINE_WATCH_DIR": folder}):
        watched = Accelerator(cpu=True)
    watched_steps = steps_of(watched, name)
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "paceline-telemetry"]
    writers_clock = time.pthread_getcpuclockid(writer.ident)
    begin = time.perf_counter()
    for _ in range(10):
        next(plain_steps)
        next(watched_steps)
    own = round(seconds / ((time.perf_counter() - begin) / 10))
    count = int(plain.collectives.broadcast_object(max(FEWEST, min(MOST, own))))
    wall: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    begin, writer_begin = time.perf_counter(), time.clock_gettime(writers_clock)
    for turn in range(count):
        for is_watched in (True, False) if turn % 2 else (False, True):
            steps = watched_steps if is_watched else plain_steps
            wall_begin, processor_begin = time.perf_counter(), time.thread_time()
            next(steps)
            processor[is_watched].append(time.thread_time() - processor_begin)
            wall[is_watched].append(time.perf_counter() - wall_begin)
    writer_s = time.clock_gettime(writers_clock) - writer_begin
    share_of_writer = writer_s / (time.perf_counter() - begin)
    watched.end_training()
    return {"wall": wall, "processor": processor, "writer": share_of_writer, "calls": calls}


def calls_of(steps: Iterator[None]) -> Counter[str]:
    """Calls of Python functions in ten steps, by the package of Paceline that the function is in."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        _, inside, rest = frame.f_code.co_filename.rpartition("/paceline/")
        if event == "call" and inside:
            calls[rest.partition("/")[0]] += 1

    for step in range(20):
        if step == 10:
            sys.setprofile(count)
        next(steps)
    sys.setprofile(None)
    return calls


def row(name: str, world: int, seconds: float) -> str:
    """10th percentiles of the steps of rank 0, and by how much they are larger with `--watch`."""
    with tempfile.TemporaryDirectory() as folder:
        taken = run_ranks(measure, world=world, args=(folder, name, seconds), timeout_s=600)[0]
        rate = bytes_a_second(Path(folder))
    plain_us, watched_us = (_percentile(taken["wall"][key]) for key in (False, True))
    plain_cpu_us, watched_cpu_us = (_percentile(taken["processor"][key]) for key in (False, True))
    more_us, more_cpu_us = watched_us - plain_us, watched_cpu_us - plain_cpu_us
    watching = taken["calls"]["observe"] + taken["calls"]["watch"]
    return (
        f"| {world} | {name} | {plain_us / 1e3:.2f} | {more_us:+.0f} ({more_us / plain_us:+.1%}) | {plain_cpu_us / 1e3:.2f} "
        f"| {more_cpu_us:+.0f} ({more_cpu_us / plain_us:+.1%}) | {taken['writer']:.2%} | {rate:.0f} | {watching} |"
    )


def _percentile(seconds: list[float]) -> float:
    """The 10th, in microseconds."""
    return quantiles(seconds, n=10)[0] * 1e6


def bytes_a_second(folder: Path) -> float:
    """Of rank 0, which writes the values too."""
    lines = JournalReader(folder).read()
    moments = [line.t for line in lines if line.role == "rank" and line.number == 0]
    return (folder / rank_file(0)).stat().st_size / (moments[-1] - moments[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few steps")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each row")
    args = parser.parse_args()
    print(
        "| processes | model | step, ms | with `--watch`, us | CPU of the training thread, ms | with `--watch`, us "
        "| writing thread, of the time | bytes a second | calls without `--watch` |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for world in (1, 2):
        for name in SHAPES:
            print(row(name, world, 1.0 if args.smoke else args.seconds), flush=True)


if __name__ == "__main__":
    main()
