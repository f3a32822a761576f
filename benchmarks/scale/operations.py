"""(a) What an operation among n processes costs, beside the bare collective of torch that does the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.testing import run_ranks
from paceline.world.collectives import Collectives
from paceline.world.world import World
from scale import growth

Case = tuple[Callable[[], object], Callable[[], object]]  # ours, by hand
SIZES = (2, 4, 8, 16, 32, 64)
TIMEOUT_S = 1200


def by_hand(leaf: torch.Tensor) -> torch.Tensor:
    """What a script without a library does."""
    parts = [torch.empty_like(leaf) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, leaf)
    return torch.stack(parts) if leaf.ndim == 0 else torch.cat(parts)


def cases() -> dict[str, Case]:
    """What is compared; the same tensors for both sides."""
    size = dist.get_world_size()
    ours = Collectives(World(dist.get_rank(), size), device=torch.device("cpu"))
    loss = torch.randn(())
    large = torch.randn(100_000)
    predictions = torch.randn(100, 5)
    targets = torch.randint(5, (100,))
    logits = torch.randn(256, 1000)
    flag = torch.zeros(1, dtype=torch.int64)
    return {
        "`barrier`": (ours.barrier, dist.barrier),
        "`any`": (lambda: ours.any(False), lambda: dist.all_reduce(flag)),
        "`reduce` of a number": (lambda: ours.reduce(loss, "mean"), lambda: dist.all_reduce(loss.clone())),
        "`reduce` of 400 kB": (lambda: ours.reduce(large), lambda: dist.all_reduce(large.clone())),
        "`gather_for_metrics` of a batch": (
            lambda: ours.gather_rows((predictions, targets), [100] * size, 100),
            lambda: [by_hand(predictions), by_hand(targets)],
        ),
        "`gather` of 1 MB logits": (lambda: ours.gather(logits), lambda: by_hand(logits)),
    }


def seconds(call: Callable[[], object], calls: int) -> float:
    """Time of one call, after all ranks have come."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def measure(rounds: int) -> dict[str, tuple[float, float, float]]:
    """On one rank: seconds of ours, by hand, and the median ratio of the rounds."""
    calls = max(2, 64 // dist.get_world_size())
    medians = {}
    for name, (own, hand) in cases().items():
        seconds(own, 2)
        seconds(hand, 2)
        pairs = []
        for number in range(rounds):
            if number % 2:
                other_s = seconds(hand, calls)
                own_s = seconds(own, calls)
            else:
                own_s = seconds(own, calls)
                other_s = seconds(hand, calls)
            pairs.append((own_s, other_s))
        own_median = statistics.median(own_s for own_s, _ in pairs)
        other_median = statistics.median(other_s for _, other_s in pairs)
        medians[name] = own_median, other_median, statistics.median(own_s / other_s for own_s, other_s in pairs)
    return medians


def table(sizes: tuple[int, ...], rounds: int) -> str:
    """The costs by processes, as Markdown."""
    by_size = {size: run_ranks(measure, size, args=(rounds,), timeout_s=TIMEOUT_S)[0] for size in sizes}
    heads = " | ".join(f"{size}" for size in sizes)
    lines = [f"| operation, ours / bare | {heads} | exponent, ours / bare |", "|---|" + "---|" * (len(sizes) + 1)]
    for name in by_size[sizes[0]]:
        cells = []
        for size in sizes:
            own_s, other_s, ratio = by_size[size][name]
            cells.append(f"{ratio:.2f} ({growth.shown(own_s)} / {growth.shown(other_s)})")
        own = growth.exponent({size: by_size[size][name][0] for size in sizes})
        other = growth.exponent({size: by_size[size][name][1] for size in sizes})
        lines.append(f"| {name} | {' | '.join(cells)} | {own:.2f} / {other:.2f} |")
    return "\n".join(lines)
