"""What `--watch` costs: a training step that is recorded against one that is not, on one process and on two ranks.

    python benchmarks/bench_watch.py            as Markdown
    python benchmarks/bench_watch.py --smoke    few and short blocks: that it runs

Both live in the same processes and take turns, block by block, in alternating order; the two blocks of each turn are compared.
Wall time varies by percents on a machine that others use. So the CPU time of the training thread is compared too, step by step:
what counts is the 10th percentile of the steps, which other programs disturb least. What the thread that writes takes is read
from its own clock: it runs during all blocks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any

import torch
from bench_profile import GPT
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.base.env import patched
from paceline.testing import run_ranks
from paceline.watch.journal import JournalReader, rank_file

# Blocks, width, vocabulary and length of a GPT, and rows of a batch: steps of about 1.5, 5 and 30 ms on one thread.
SHAPES = {
    "smallest": ((1, 32, 64, 8), 1),
    "small": ((2, 128, 512, 32), 4),
    "medium": ((4, 256, 2000, 64), 8),
}
BLOCK_S = 0.1


def steps_of(accelerator: Accelerator, shape: tuple[int, int, int, int], rows: int) -> Callable[[int], list[float]]:
    """What takes so many steps, as a loop does, and tells the CPU seconds of this thread for each."""
    torch.manual_seed(0)
    model = GPT(*shape)
    data = TensorDataset(torch.randint(0, shape[2], (64 * rows * accelerator.num_processes, shape[3])))
    loader = DataLoader(data, batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loader)

    def steps(count: int) -> list[float]:
        moments = [time.thread_time()]
        while True:
            for (tokens,) in loader:
                loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                moments.append(time.thread_time())
                if len(moments) > count:
                    return [end - begin for begin, end in pairwise(moments)]

    return steps


def measure(folder: str, shape: tuple[int, int, int, int], rows: int, turns: int) -> dict[str, Any]:
    """Wall seconds of a step in each block, and CPU seconds of each step, not recorded and recorded. Ranks: all."""
    torch.set_num_threads(1)
    plain = Accelerator(cpu=True)
    plain_steps = steps_of(plain, shape, rows)
    calls = calls_of(plain_steps)
    with patched({"PACELINE_WATCH_DIR": folder}):
        watched = Accelerator(cpu=True)
    watched_steps = steps_of(watched, shape, rows)
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "paceline-telemetry"]
    writers_clock = time.pthread_getcpuclockid(writer.ident)
    watched_steps(10)
    begin = time.perf_counter()
    plain_steps(10)
    own = max(1, round(10 * BLOCK_S / (time.perf_counter() - begin)))
    count = int(plain.collectives.broadcast_object(own))

    wall: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    begin, writer_begin = time.perf_counter(), time.clock_gettime(writers_clock)
    for turn in range(turns):
        for is_watched in (True, False) if turn % 2 else (False, True):
            plain.wait_for_everyone()
            block_begin = time.perf_counter()
            processor[is_watched] += (watched_steps if is_watched else plain_steps)(count)
            plain.wait_for_everyone()
            wall[is_watched].append((time.perf_counter() - block_begin) / count)
    writer_s = time.clock_gettime(writers_clock) - writer_begin
    share_of_writer = writer_s / (time.perf_counter() - begin)
    watched.end_training()
    return {"wall": wall, "processor": processor, "writer": share_of_writer, "calls": calls}


def calls_of(steps: Callable[[int], list[float]]) -> Counter[str]:
    """Calls of Python functions in ten steps, by the package of Paceline that the function is in."""
    steps(10)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        _, inside, rest = frame.f_code.co_filename.rpartition("/paceline/")
        if event == "call" and inside:
            calls[rest.partition("/")[0]] += 1

    sys.setprofile(count)
    steps(10)
    sys.setprofile(None)
    return calls


def row(name: str, world: int, turns: int) -> str:
    """Medians of blocks, with the quartiles of the ratios, and the 10th percentiles of steps; on rank 0."""
    shape, rows = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        taken = run_ranks(measure, world=world, args=(folder, shape, rows, turns), timeout_s=600)[0]
        rate = bytes_a_second(Path(folder))
    ratios = [watched / plain for plain, watched in zip(taken["wall"][False], taken["wall"][True], strict=True)]
    step_ms = median(taken["wall"][False]) * 1e3
    plain_us, watched_us = (quantiles(taken["processor"][key], n=10)[0] * 1e6 for key in (False, True))
    more_us = watched_us - plain_us
    share = more_us / step_ms / 1e3
    watching = taken["calls"]["observe"] + taken["calls"]["watch"]
    return (
        f"| {world} | {name} | {step_ms:.2f} | {_spread(ratios)} | {plain_us:.0f} | {more_us:.0f} | {share:.2%} | "
        f"{taken['writer']:.3%} | {rate:.0f} | {watching} |"
    )


def bytes_a_second(folder: Path) -> float:
    """Of rank 0, which writes the values too."""
    lines = JournalReader(folder).read()
    moments = [line.t for line in lines if line.role == "rank" and line.number == 0]
    return (folder / rank_file(0)).stat().st_size / (moments[-1] - moments[0])


def _spread(ratios: list[float]) -> str:
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} .. {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few and short turns")
    parser.add_argument("--turns", type=int, default=80, help="turns of each row")
    parser.add_argument("--models", default=",".join(SHAPES), help="rows, joined by commas")
    args = parser.parse_args()
    turns = 8 if args.smoke else args.turns
    print(
        "| processes | model | step without, ms | with / without, wall | training thread without, us | more with, us "
        "| more, of a step | writing thread, of the time | bytes a second, rank 0 | calls without `--watch` |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for world in (1, 2):
        for name in args.models.split(","):
            print(row(name, world, turns), flush=True)


if __name__ == "__main__":
    main()
