"""The loader that `deepspeed.initialize(training_data=...)` returns: micro-batches of a shuffled data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

if TYPE_CHECKING:
    from paceline_deepspeed.engine_parts import Engine


class SharedOrder(Sampler[int]):
    """One order for all ranks: the permutation that torch's DistributedSampler draws.

    As under DeepSpeed, whose loader never calls `set_epoch`, each epoch has the same order until the script calls it.

    Args:
        size: how many samples there are.
    """

    is_told_by_script = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        return iter(torch.randperm(self.size, generator=generator).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def loader_of(
    dataset: Dataset[Any],
    batch_size: int,
    collate_fn: Callable[[Any], Any] | None,
    drop_last: bool,
    shuffle: bool = True,
    workers: int = 0,
) -> DataLoader[Any]:
    """Makes a loader of one rank's micro-batches; `prepare` divides its samples over the ranks later."""
    # `prepare` divides the order over the ranks, so it has to be the same on all of them. A stream has its own.
    sampler = None
    if shuffle and not isinstance(dataset, IterableDataset):
        sampler = SharedOrder(len(cast(Sized, dataset)))
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last, num_workers=workers
    )
    loader.data_sampler = loader.sampler  # DeepSpeed's name of it
    return loader


def deepspeed_io(
    engine: Engine,
    dataset: Dataset[Any],
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> Any:
    """Makes a loader of micro-batches; on the route "train", without a sampler, samples are divided over the ranks."""
    size = batch_size or engine.batch.micro
    drop_last = engine.config["dataloader_drop_last"]
    if route == "train" and data_sampler is None:
        loader = loader_of(dataset, size, collate_fn, drop_last, engine.shuffles(), workers=num_local_io_workers or 0)
        return engine.accelerator.preparation.prepare([loader])[0]
    # As under DeepSpeed, a sampler of the script's is taken as it is, and other routes read all samples on each rank.
    return DataLoader(
        dataset,
        size,
        sampler=data_sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_local_io_workers or 0,
        pin_memory=pin_memory and engine.view.device.type != "cpu",
    )
