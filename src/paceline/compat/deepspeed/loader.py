"""The loader that `deepspeed.initialize(training_data=...)` returns: micro-batches of a shuffled data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

if TYPE_CHECKING:
    from paceline.compat.deepspeed.engine import DeepSpeedEngine


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
    **keywords: Any,
) -> DataLoader[Any]:
    """A loader of one rank's micro-batches, yet to be prepared, which divides its samples over ranks.

    Args:
        keywords: for `DataLoader`; a `sampler` among them wins over `shuffle`.
    """
    if shuffle and not isinstance(dataset, IterableDataset):
        keywords = {"sampler": SharedOrder(len(dataset))} | keywords
    return DataLoader(
        dataset,
        batch_size=batch_size,
        collate_fn=collate_fn,
        drop_last=drop_last,
        **keywords,
    )


def deepspeed_io(
    engine: DeepSpeedEngine,
    dataset: Any,
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = True,
    data_sampler: Sampler[int] | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    num_local_io_workers: int | None = None,
) -> Any:
    """A prepared loader of a data set, which gives each rank its share.

    Args:
        batch_size: of one rank; None is the engine's micro-batch.
        route: "train" shuffles; "eval" and "predict" keep the order.
        pin_memory: as under `DataLoader`; without an accelerator nothing is pinned.
        data_sampler: gives the order in place of `route`.
        num_local_io_workers: processes that load; None is none.
    """
    keywords: dict[str, Any] = {"num_workers": num_local_io_workers or 0}
    keywords["pin_memory"] = pin_memory and engine.device.type != "cpu"
    if data_sampler is not None:
        keywords["sampler"] = data_sampler
    size = batch_size or engine.batch.micro
    loader = loader_of(dataset, size, collate_fn, engine.dataloader_drop_last(), route == "train", **keywords)
    return engine.accelerator.prepare(loader)
