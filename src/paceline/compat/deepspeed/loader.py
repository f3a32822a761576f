"""The loader that `deepspeed.initialize(training_data=...)` returns: micro-batches of a shuffled data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler


class SharedOrder(Sampler[int]):
    """One order for all ranks, another each epoch: of the first, the permutation that torch's DistributedSampler draws.

    Args:
        size: how many samples there are.
    """

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def loader_of(
    dataset: Any,
    batch_size: int,
    collate_fn: Callable[[Any], Any] | None,
    drop_last: bool,
    shuffle: bool = True,
    workers: int = 0,
) -> DataLoader[Any]:
    """A loader of one rank's micro-batches, yet to be prepared, which divides its samples over ranks."""
    ordered = shuffle and not isinstance(dataset, IterableDataset)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=SharedOrder(len(dataset)) if ordered else None,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=workers,
    )
