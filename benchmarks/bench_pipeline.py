"""How long ranks of a pipeline wait: measured, beside what the schedule's formula predicts and beside the ideal time.

    python benchmarks/bench_pipeline.py [--ranks 2] [--turns 5]

Blocks sleep instead of computing, so that cores which several ranks share do not blur what a schedule does: forward and
backward (half for inputs, half for weights) take the same time on every stage.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import nn

from paceline import Accelerator
from paceline.testing import run_ranks
from paceline_large.pipeline.split import SCHEDULES
from paceline_large.pipeline.timing import measure

FORWARD_S = 0.024  # of all blocks of a rank; as long again for gradients of inputs, and for those of weights
BLOCKS = 2  # on each rank


class Sleep(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        time.sleep(seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None, None


class SleepWeight(torch.autograd.Function):
    """One weight, whose gradient takes its time."""

    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Block(nn.Module):
    """Works for `FORWARD_S / BLOCKS` forward and twice that backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = nn.Identity()

    def forward(self, x):
        return Sleep.apply(x, None, FORWARD_S / BLOCKS) * SleepWeight.apply(self.weight, FORWARD_S / BLOCKS)


class Chain(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def run(schedule: str, microbatches: int, turns: int) -> tuple[float, float]:
    """Median time of a batch, and this rank's share of waiting."""
    accelerator = Accelerator(
        plan={"pp": torch.distributed.get_world_size()}, cpu=True,
        options={"pipeline": {"schedule": schedule, "microbatches": microbatches}},
    )  # fmt: skip
    model = accelerator.prepare(Chain(BLOCKS * accelerator.num_processes))
    batch = (torch.ones(microbatches, 4), torch.ones(microbatches, 4))
    times = []
    with measure(model) as meter:
        for turn in range(turns + 1):
            if turn == 1:
                meter.busy_s = meter.total_s = 0.0  # the first builds the schedule
            begin = time.perf_counter()
            accelerator.forward_backward(model, batch, lambda output, target: (output - target).mean())
            times.append(time.perf_counter() - begin)
    return median(times[1:]), meter.bubble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    ranks = options.ranks
    print(
        f"{ranks} ranks; ideal: {3 * FORWARD_S * 1e3:.0f} ms of work for each micro-batch, and the predicted bubble\n"
    )
    print("| schedule | micro-batches | time, ms | ideal, ms | over ideal | bubble | predicted |")
    print("|---|---|---|---|---|---|---|")
    for schedule in SCHEDULES.values():
        for count in (2 * ranks, 4 * ranks):
            results = run_ranks(run, ranks, args=(schedule.name, count, options.turns))
            taken = max(seconds for seconds, _ in results)
            bubble = sum(share for _, share in results) / ranks
            predicted = schedule.bubble(count, ranks, schedule.stages_per_rank)
            ideal = 3 * FORWARD_S * count / (1 - predicted)
            print(
                f"| {schedule.name} | {count} | {taken * 1e3:.0f} | {ideal * 1e3:.0f} | {taken / ideal - 1:+.1%} "
                f"| {bubble:.3f} | {predicted:.3f} |"
            )


if __name__ == "__main__":
    main()
