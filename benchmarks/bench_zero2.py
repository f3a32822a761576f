"""What ZeRO 2's own reducer earns over FSDP2 that keeps its parameters until the backward pass is over, and over DDP.

    python benchmarks/bench_zero2.py                      2, 4 and 8 ranks, a GPT of 24 million parameters
    python benchmarks/bench_zero2.py --ranks 2 --size 4M  fewer ranks, a smaller model

Time: both members of a pair train in the same processes, one step each in turns; the median of the ratios counts. Memory:
bytes a parameter that a rank holds after a step and at the peak of one, the most of any rank (see `memory.py`): with 32
tokens, where gradients make the peak, and with 1024, where activations do.
"""

from __future__ import annotations

import argparse
import time

import bench_parallel
import memory
import torch
from parallel.ways import Task, Way, paceline

from paceline.testing import run_ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--size", choices=("24M", "4M"), default="24M")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, GPT {options.size}, {options.turns} turns\n")
    print("| ranks | way | step / DDP (quartiles) | step / FSDP2 (quartiles) | at rest | peak, 32 | peak, 1024 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks in options.ranks:
        ddp = paceline(replicate=ranks)
        fsdp = paceline(shard=ranks, options={"shard": {"reshard": False}})
        ways = {"DDP": ddp, "FSDP2 without resharding": fsdp, "zero 2": paceline(shard=ranks, zero=2)}
        for name, way in ways.items():
            cells = []
            for peer in (ddp, fsdp):
                if way is peer:
                    cells.append("1")
                    continue
                args = (way, peer, Task(options.size, rows=4), options.turns)
                result = run_ranks(bench_parallel.rank, world=ranks, args=args, timeout_s=900, output=[])[0]
                cells.append(f"{result.ratio:.3f} ({result.low:.3f} .. {result.high:.3f})")
            rest, peak_short = _memory(way, Task(options.size, rows=1, length=32), ranks)
            _, peak_long = _memory(way, Task(options.size, rows=4, length=256), ranks)
            cells += [f"{rest:.2f}", f"{peak_short:.2f}", f"{peak_long:.2f}"]
            print(f"| {ranks} | {name} | {' | '.join(cells)} |", flush=True)


def _memory(way: Way, task: Task, ranks: int) -> tuple[float, float]:
    """At rest and at the peak, the most of any rank."""
    of_ranks = run_ranks(memory.rank, world=ranks, args=(way, task, "no"), timeout_s=900, output=[])
    return max(rest for rest, _ in of_ranks), max(peak for _, peak in of_ranks)


if __name__ == "__main__":
    main()
