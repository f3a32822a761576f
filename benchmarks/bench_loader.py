"""What a prepared loader costs per batch over the plain DataLoader loop, and how fast a long epoch is resumed.

    python benchmarks/bench_loader.py

Two loops over the same dataset, one plain and one prepared (one process, device cpu), run in alternating pairs; the
difference of each pair is divided by the number of batches, and the median is shown.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.prepare import prepare_loader

BATCHES, PAIRS, LONG = 2000, 15, 10_000_000


class Indices:
    """Gives back what it is asked for: reading costs nothing, so that the loop itself is what is measured."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(IterableDataset[int]):
    """Integers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


def seconds(loader: Any) -> float:
    """CPU time of one epoch: nothing here waits, and other work on the machine then counts less."""
    begin = time.process_time()
    for _ in loader:
        pass
    return time.process_time() - begin


def overhead_us(loader: DataLoader[Any]) -> tuple[float, float]:
    """Median of (prepared - plain) per batch, and of plain, in microseconds."""
    ours = prepare_loader(loader, width=1, index=0, device="cpu")
    seconds(loader), seconds(ours)
    plain, extra = [], []
    for pair in range(PAIRS):
        first, second = (loader, ours) if pair % 2 else (ours, loader)
        times = {first: seconds(first), second: seconds(second)}
        plain.append(times[loader])
        extra.append(times[ours] - times[loader])
    return statistics.median(extra) / BATCHES * 1e6, statistics.median(plain) / BATCHES * 1e6


def first_batch_ms(loader: Any, samples: int) -> float:
    """Time from `load_state_dict` to the first batch of an epoch whose order is not drawn yet."""
    state = {"epoch": 0, "samples": 0, "seed": 0, "length": LONG}
    loader.load_state_dict(state)
    next(iter(loader))
    loader.load_state_dict({**state, "epoch": 1, "samples": samples})
    begin = time.perf_counter()
    next(iter(loader))
    return (time.perf_counter() - begin) * 1e3


def resume_ms(shuffle: bool) -> tuple[float, float]:
    """Beginning a long epoch, and what resuming in the middle of it takes on top; medians of alternating pairs."""
    loader = DataLoader(range(LONG), batch_size=32, shuffle=shuffle)  # type: ignore[arg-type]
    ours = prepare_loader(loader, width=1, index=0, device="cpu")
    begun, extra = [], []
    for pair in range(PAIRS):
        order = (LONG // 2, 0) if pair % 2 else (0, LONG // 2)
        times = {samples: first_batch_ms(ours, samples) for samples in order}
        begun.append(times[0])
        extra.append(times[LONG // 2] - times[0])
    return statistics.median(begun), statistics.median(extra)


def kept_ms() -> float:
    """Resuming in the middle of a long shuffled epoch whose order is drawn already."""
    loader = DataLoader(range(LONG), batch_size=32, shuffle=True)  # type: ignore[arg-type]
    ours = prepare_loader(loader, width=1, index=0, device="cpu", seed=0)
    next(iter(ours))
    ours.load_state_dict({"epoch": 0, "samples": LONG // 2, "seed": 0, "length": LONG})
    begin = time.perf_counter()
    next(iter(ours))
    return (time.perf_counter() - begin) * 1e3


def main() -> int:
    """Prints one line a measurement; fails where the loop costs more than 5 us a batch."""
    torch.set_num_threads(1)
    size, worst = 32, 0.0
    cases = {
        "sequential": DataLoader(Indices(BATCHES * size), size, collate_fn=lambda rows: rows),
        "shuffled": DataLoader(Indices(BATCHES * size), size, shuffle=True, collate_fn=lambda rows: rows),
        "iterable": DataLoader(Stream(BATCHES * size), size, collate_fn=lambda rows: rows),
    }
    for name, loader in cases.items():
        extra, plain = overhead_us(loader)
        worst = max(worst, extra)
        print(f"{name:10}  plain {plain:6.2f} us a batch, prepared {extra:+6.2f} us")
    for name, shuffle in (("sequential", False), ("shuffled", True)):
        begun, extra = resume_ms(shuffle)
        print(f"{name:10}  first batch of {LONG:,} samples {begun:.2f} ms; in the middle of them {extra:+.2f} ms")
    print(f"skipping to the middle of an order that is drawn: {kept_ms():.2f} ms")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, one thread, medians of {PAIRS} pairs")
    return int(worst > 5)


if __name__ == "__main__":
    sys.exit(main())
