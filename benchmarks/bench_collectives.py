"""Gathering a step's results on several ranks, against all_gathers written by hand.

    python benchmarks/bench_collectives.py [--ranks 2] [--rounds 40]

Each round times both, one after the other in changing order, in the same processes; the ratio is the median of the
rounds' ratios. Below 1.0 Paceline is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.testing import run_ranks
from paceline.world.collectives import Collectives
from paceline.world.world import World

CALLS = 50  # in one timing


def by_hand(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a script without a library does."""
    joined = []
    for leaf in leaves:
        parts = [torch.empty_like(leaf) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, leaf)
        joined.append(torch.stack(parts) if leaf.ndim == 0 else torch.cat(parts))
    return joined


def seconds(call: Callable[[], object]) -> float:
    """Time of one call."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS


def measure(rounds: int) -> dict[str, tuple[float, float, float]]:
    """One rank: {case: (ours in us, by hand in us, ratio)}."""
    size = dist.get_world_size()
    ours = Collectives(World(dist.get_rank(), size), device=torch.device("cpu"))
    pred, target, loss = torch.randn(100, 5), torch.randint(5, (100,)), torch.randn(())
    big = torch.randn(256, 1000)
    full = [100] * size
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "gather_rows (pred[100,5], target[100], loss[])": (
            lambda: ours.gather_rows((pred, target, loss), full, 100),
            lambda: by_hand([pred, target, loss]),
        ),
        "gather pred[100,5]": (lambda: ours.gather(pred), lambda: by_hand([pred])),
        "gather logits[256,1000]": (lambda: ours.gather(big), lambda: by_hand([big])),
        "reduce loss[] mean": (lambda: ours.reduce(loss, "mean"), lambda: dist.all_reduce(loss.clone())),
        "sum_ints of 2": (lambda: ours.sum_ints([1, 2]), lambda: dist.all_reduce(torch.tensor([1, 2]))),
        "barrier": (ours.barrier, dist.barrier),
        "gather_object {...}": (
            lambda: ours.gather_object({"a": 1}),
            lambda: dist.all_gather_object([None] * size, {"a": 1}),
        ),
    }
    found = {}
    for name, (mine, hand) in cases.items():
        seconds(mine), seconds(hand)
        pairs = []
        for number in range(rounds):
            if number % 2:
                other, own = seconds(hand), seconds(mine)
            else:
                own, other = seconds(mine), seconds(hand)
            pairs.append((own, other))
        ratio = statistics.median(own / other for own, other in pairs)
        found[name] = (*(statistics.median(column) * 1e6 for column in zip(*pairs, strict=True)), ratio)
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    rows = run_ranks(measure, options.ranks, args=(options.rounds,), timeout_s=600)[0]
    print(f"torch {torch.__version__}, gloo over loopback, {options.ranks} ranks, median of {options.rounds} pairs")
    print("| case | ours us | by hand us | ratio |\n|---|---|---|---|")
    for name, (own, other, ratio) in rows.items():
        print(f"| {name} | {own:.0f} | {other:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
