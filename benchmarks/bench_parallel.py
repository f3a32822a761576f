"""What each plan costs in time: a GPT of 24 million parameters on 2 ranks, one thread each, against the same by hand.

    python benchmarks/bench_parallel.py                 all rows, as Markdown
    python benchmarks/bench_parallel.py --turns 5       fewer turns
    python benchmarks/bench_parallel.py --only zero     rows whose name holds this

Both members of a row train side by side in the same two processes, one step each in turns; what counts is the median of
the ratios of the turns. "DDP by hand" is the best there is: gradients as views of its buckets, fused AdamW.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from parallel.ways import Task, Way, ddp, deepspeed, deepspeed_is_there, fully_sharded, paceline, zero_redundancy
from timing import Result, pairs, seconds

from paceline.testing import run_ranks

RANKS = 2


@dataclass(frozen=True)
class Row:
    """A candidate, its peer, and the ratio of their times that it must reach (None: for comparison alone)."""

    name: str
    way: Way
    against: str
    peer: Way
    must: float | None = None


BY_HAND = "DDP by hand"
ZERO_1, ZERO_2, ZERO_3 = (paceline(shard=RANKS, zero=stage) for stage in (1, 2, 3))
NO_RESHARD = paceline(shard=RANKS, options={"shard": {"reshard": False}})

ROWS = [
    Row("replicate", paceline(replicate=RANKS), BY_HAND, ddp(), 1.01),
    Row("shard, zero 1", ZERO_1, BY_HAND, ddp(), 1.12),
    Row("shard, zero 2", ZERO_2, BY_HAND, ddp(), 1.25),
    Row("shard, zero 3", ZERO_3, BY_HAND, ddp(), 1.35),
    Row("shard, zero 1", ZERO_1, "ZeroRedundancyOptimizer by hand", zero_redundancy, 1.0),
    Row("shard, zero 2", ZERO_2, "fully_shard by hand, no reshard", fully_sharded(False), 1.0),
    Row("shard without reshard", NO_RESHARD, "fully_shard by hand, no reshard", fully_sharded(False), 1.0),
    Row("shard, zero 3", ZERO_3, "fully_shard by hand", fully_sharded(True), 1.0),
    Row("ZeroRedundancyOptimizer by hand", zero_redundancy, BY_HAND, ddp()),
    Row("fully_shard by hand, no reshard", fully_sharded(False), BY_HAND, ddp()),
    Row("fully_shard by hand", fully_sharded(True), BY_HAND, ddp()),
]
PEERS = [Row(f"shard, zero {s}", way, f"DeepSpeed, zero {s}", deepspeed(s), 1.0) for s, way in
         ((1, ZERO_1), (2, ZERO_2), (3, ZERO_3))]  # fmt: skip


def rank(way: Way, peer: Way, task: Task, turns: int) -> Result:
    """Both on this rank, in turns; a step begins when all ranks are there."""
    torch.set_num_threads(1)

    def timed(step: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            dist.barrier()
            return seconds(step, 1)

        return run

    candidate, other = timed(way(task)), timed(peer(task))
    for _ in range(2):  # buckets are arranged, states and caches made
        candidate(), other()
    return pairs(candidate, other, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose name, or whose peer's, holds this")
    parser.add_argument("--size", choices=("24M", "4M"), default="24M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    task = Task(options.size, options.rows, options.length)
    print(
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {options.turns} turns, medians (quartiles), "
        f"GPT {options.size}, {options.rows} x {options.length} tokens a rank\n"
    )
    print("| what | Paceline | peer | ratio | must reach |\n| --- | --- | --- | --- | --- |")
    for row in ROWS + (PEERS if deepspeed_is_there() else []):
        if options.only in f"{row.name} {row.against}":
            args = (row.way, row.peer, task, options.turns)
            result = run_ranks(rank, world=RANKS, args=args, timeout_s=900, output=[])[0]
            must = "-" if row.must is None else f"<= {row.must:.2f}"
            print(result.row(row.name, row.against, must), flush=True)


if __name__ == "__main__":
    main()
