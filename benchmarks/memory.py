"""Bytes on a rank, measured: at rest after a step (gradients kept) and at the peak of a step, beside the formulas.

    python benchmarks/memory.py                        2 and 4 ranks, a GPT of 24 million parameters
    python benchmarks/memory.py --size 4M --world 2    a smaller one; --rows 8 --length 64 for more activations
    python benchmarks/memory.py --less                 ways to need less: recomputation, float8, few bits, disk
    python benchmarks/memory.py --less --device sim    the same on an accelerator, and offload to the host's memory

All numbers are bytes a parameter. Formulas (a = number of parameters, n = ranks) are those of float32 training with Adam;
"mixed" rows compute in bf16. The micro-batch is one short row, so that activations do not hide what the plan divides.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from parallel.held import can_measure, held, measure
from parallel.model import gpt, loss_of
from parallel.ways import Task, Way, ddp, deepspeed, deepspeed_is_there, fully_sharded, paceline, zero_redundancy

from paceline.testing import run_ranks


@dataclass(frozen=True)
class Row:
    """One way of training, and the formula for its memory at rest; `plan` marks those of Paceline, which can be predicted."""

    name: str
    way: Way
    formula: str
    at_rest: Callable[[int], float]
    plan: dict | None = None
    precision: str = "no"

    @classmethod
    def of(cls, name: str, formula: str, at_rest: Callable[[int], float], precision: str = "no", **plan) -> Row:
        """A plan of Paceline; `width` in it stands for the number of ranks."""
        return cls(name, paceline(precision, **plan), formula, at_rest, plan, precision)


def rows(n: int) -> list[Row]:
    """What is measured at `n` ranks."""
    stages = {1: lambda n: 8 + 8 / n, 2: lambda n: 4 + 12 / n, 3: lambda n: 16 / n}
    texts = {1: "8a + 8a/n", 2: "4a + 12a/n", 3: "16a/n"}
    found = [
        Row("DDP by hand, separate buckets", ddp(views=False), "20a", lambda n: 20),
        Row("DDP by hand, bucket views", ddp(), "16a", lambda n: 16),
        Row.of("replicate", "16a", lambda n: 16, replicate=n),
        Row.of("replicate, mixed", "18a", lambda n: 18, "bf16", replicate=n),
        Row("ZeroRedundancyOptimizer by hand", zero_redundancy, texts[1], stages[1]),
        Row.of("shard, zero 1", texts[1], stages[1], shard=n, zero=1),
        Row.of("shard, zero 1, mixed", texts[1], stages[1], "bf16", shard=n, zero=1),
        Row("fully_shard by hand, no reshard", fully_sharded(False), texts[2], stages[2]),
        Row.of("shard, zero 2", texts[2], stages[2], shard=n, zero=2),
        Row.of("shard, zero 2, mixed", texts[2], stages[2], "bf16", shard=n, zero=2),
        Row("fully_shard by hand", fully_sharded(True), texts[3], stages[3]),
        Row.of("shard, zero 3", texts[3], stages[3], shard=n, zero=3),
        Row.of("shard, zero 3, mixed", texts[3], stages[3], "bf16", shard=n, zero=3),
    ]
    if n == 4:
        found.append(Row.of("replicate 2 x shard 2", "16a/2", lambda n: 8, replicate=2, shard=2))
    if deepspeed_is_there():
        found += [Row(f"DeepSpeed, zero {s}", deepspeed(s), texts[s], stages[s]) for s in (1, 2, 3)]
    return found


def rows_of_less(n: int, device: str) -> list[Row]:
    """Ways to need less memory, at `n` ranks. Files are no memory that a process holds."""
    files = tempfile.mkdtemp()
    ours = [
        Row.of("zero 2, recompute blocks", "4a + 12a/n", lambda n: 4 + 12 / n, shard=n, zero=2, recompute="blocks"),
        Row.of("replicate, fp8", "16a", lambda n: 16, "fp8", replicate=n),
        # Two codes, and a scale of 4 bytes for 256 of them.
        Row.of("zero 1, adamw8bit", "8a + 2.03a/n", lambda n: 8 + 2.03 / n, eight_bits=True, shard=n, zero=1),
        Row.of("zero 1, states on disk", "8a", lambda n: 8, shard=n, zero=1, offload=f"optimizer=disk:{files}"),
        Row.of("zero 3, states on disk", "8a/n", lambda n: 8 / n, shard=n, zero=3, offload=f"optimizer=disk:{files}"),
    ]
    on_host = 0 if device != "cpu" else 4
    all_on_disk = f"all=disk:{files}"
    ours.append(Row.of("zero 3, all on disk", "4a/n", lambda n: on_host / n, shard=n, zero=3, offload=all_on_disk))
    if device != "cpu":
        ours += [
            Row.of("replicate, states on the host", "8a", lambda n: 8, replicate=n, offload="optimizer"),
            Row.of(
                "zero 2, states on the host", "4a + 4a/n", lambda n: 4 + 4 / n, shard=n, zero=2, offload="optimizer"
            ),
            Row.of("zero 3, all on the host", "0", lambda n: 0, shard=n, zero=3, offload="all"),
            Row.of("replicate, activations on the host", "16a", lambda n: 16, replicate=n, offload="activations"),
        ]
    return ours


def settled(way: Way, task: Task, precision: str) -> int:
    """Bytes held once everything is imported, and libraries have the work space that a model of this size needs."""
    if task.device != "cpu":
        return 0  # its counter counts tensors alone
    way(replace(task, size="tiny"))()
    model, (inputs, targets) = task.model(), task.batch()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = loss_of(model(inputs).float(), targets)
    loss.backward()
    del model, loss
    gc.collect()
    return held()


def rank(way: Way, task: Task, precision: str) -> tuple[float, float]:
    """At rest and at the peak, in bytes a parameter, on this rank."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # torchao compiles the step of its optimizers
    base = settled(way, task, precision)
    step = way(task)
    rest, peak = measure(step, base, task.device)
    count = sum(parameter.numel() for parameter in gpt(task.size).parameters())
    return rest / count, peak / count


def predicted(way: Way, task: Task, n: int) -> float:
    """The peak that the planner says beforehand, in bytes a parameter, as rank 0 of `n`."""
    from paceline_lens.forecast.rehearsal import SimulatedWorld, rehearse

    # A rehearsal has no device: tensors without memory that stand for those of any are the CPU's.
    imagined = replace(task, device="cpu")

    def train() -> None:
        step = way(imagined)
        for _ in range(5):
            step()

    seen = rehearse(train, SimulatedWorld(n, n, accelerated=task.device != "cpu"))
    if seen.memory is None:
        raise RuntimeError(f"the rehearsal failed: {seen.problem}")
    return seen.memory.total / sum(parameter.numel() for parameter in gpt(task.size).parameters())


def report(task: Task, worlds: list[int], less: bool, only: str) -> int:
    """Prints one table for each number of ranks; how many rows of ours are over their formula + 5 %."""
    over = 0
    for n in worlds:
        print(f"\n**{n} ranks** (bytes a parameter; the most of any rank)\n")
        print("| what | formula | | at rest | peak | predicted peak | at rest / formula |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for row in rows_of_less(n, task.device) if less else rows(n):
            if only not in row.name:
                continue
            args = (row.way, task, row.precision)
            found = run_ranks(rank, world=n, args=args, timeout_s=600, output=[])
            rest, peak = (max(each) for each in zip(*found, strict=True))
            limit = row.at_rest(n)
            over += row.plan is not None and rest > 1.05 * limit + 0.05
            said = "" if row.plan is None else f"{predicted(row.way, task, n):.2f}"
            share = f"{rest / limit:.2f}" if limit else ""
            cells = (row.name, row.formula, f"{limit:.1f}", f"{rest:.2f}", f"{peak:.2f}", said, share)
            print(f"| {' | '.join(cells)} |", flush=True)
    return over


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("24M", "4M"), default="24M")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--less", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options = parser.parse_args()
    if not can_measure(options.device):
        print("not measured: this C library has no mallinfo2", file=sys.stderr)
        return 1
    print(
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, GPT {options.size}, "
        f"{options.rows} x {options.length} tokens a rank"
    )
    task = Task(options.size, options.rows, options.length, options.device)
    return 1 if report(task, options.world, options.less, options.only) else 0


if __name__ == "__main__":
    raise SystemExit(main())
