"""What only an accelerator shows: half precision, offload, prefetch, recompute and compile, each against the plan without.

    python benchmarks/gpu/bench_device.py                                          one accelerator
    paceline launch --procs 4 benchmarks/gpu/bench_device.py                       shards, prefetch and their overlap too
    python benchmarks/gpu/bench_device.py --device cpu --size 4M --turns 2         tries it out anywhere

For each row the median ratio of step times, in turns with the plan named beside it, and the peak memory of both.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from parallel.held import can_measure, held, measure
from parallel.ways import Task, paceline
from timing import pairs

from paceline import Accelerator


@dataclass(frozen=True)
class Row:
    """A plan, and the plan that it is compared with."""

    name: str
    plan: dict[str, Any]
    against: str = "float32"
    other: dict[str, Any] = field(default_factory=dict)


def rows(ranks: int) -> list[Row]:
    """What can be compared on so many ranks."""
    bf16 = {"precision": "bf16"}
    found = [
        Row("bf16", bf16),
        Row("fp16, with loss scaling", {"precision": "fp16"}, "bf16", bf16),
        Row("bf16, blocks recomputed", {**bf16, "recompute": "blocks"}, "bf16", bf16),
        Row("bf16, selectively recomputed", {**bf16, "recompute": "selective"}, "bf16", bf16),
        Row("bf16, blocks compiled", {**bf16, "compile": True}, "bf16", bf16),
        Row("bf16, optimizer offloaded", {**bf16, "offload": "optimizer"}, "bf16", bf16),
    ]
    if ranks > 1:
        shard = {**bf16, "shard": ranks}
        ahead = {**shard, "options": {"shard": {"prefetch": 2}}}
        found += [
            Row("bf16, shard", shard, "bf16, replicate", {**bf16, "replicate": ranks}),
            Row("bf16, shard, two units ahead", ahead, "bf16, shard", shard),
            Row("bf16, shard, all offloaded", {**shard, "offload": "all"}, "bf16, shard", shard),
        ]
    return found


def timed(step: Callable[[], None], device: torch.device) -> Callable[[], float]:
    """Seconds of a step, the device's own work included."""

    def run() -> float:
        start = time.perf_counter()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - start

    return run


def peak(plan: dict[str, Any], task: Task) -> float:
    """MiB at the peak of a step."""
    gc.collect()
    base = held(task.device)
    return measure(paceline(**plan)(task), base, task.device)[1] / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--size", choices=("4M", "24M", "350M"), default="350M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--device", default="", help="cpu tries it out; the default is the accelerator")
    options = parser.parse_args()
    world = Accelerator(cpu=options.device == "cpu")
    task = Task(options.size, options.rows, options.length, str(world.device))
    world.print(f"torch {torch.__version__}, {world.device}, {world.num_processes} ranks, GPT {options.size}, "
                f"{options.rows} x {options.length} tokens a rank, {options.turns} turns\n")  # fmt: skip
    world.print("| what | Paceline | against | ratio | peak MiB |\n| --- | --- | --- | --- | --- |")
    for row in rows(world.num_processes):
        one, other = (timed(paceline(**plan)(task), world.device) for plan in (row.plan, row.other))
        for _ in range(3):
            one(), other()
        found = pairs(one, other, options.turns)
        del one, other
        counted = can_measure(task.device)
        most = f"{peak(row.plan, task):.0f}, against {peak(row.other, task):.0f}" if counted else "not measured"
        world.print(found.row(row.name, row.against, most))
    world.end_training()


if __name__ == "__main__":
    main()
