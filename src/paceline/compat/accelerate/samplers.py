"""accelerate's samplers and its view of a stream: each gives one process its part, as `sample_order` divides it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from paceline.compat.accelerate.sample_order import (
    Share,
    shares_of_split_batches,
    shares_of_stream,
    shares_of_whole_batches,
)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is that of its seed plus the number of the epoch.

    Args:
        args, kwargs: as for `RandomSampler`.
        data_seed: the seed; None takes torch's.

    Attributes:
        initial_seed: the seed.
        epoch: number of the epoch; an iteration to the end adds one.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next one."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The batches of one process out of those of a batch sampler.

    Args:
        batch_sampler: gives the batches of all processes.
        num_processes, process_index: how many there are, and which one this is.
        split_batches: each process takes a part of every batch, and no whole ones.
        even_batches: fills the last batches with the epoch's first samples; else some processes may have fewer.

    Raises:
        ValueError: where batches are to be split and cannot.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ValueError(
                f"Batches of {self.batch_size} cannot be split over {num_processes} processes: with split_batches=True "
                f"the batch size is a multiple of the number of processes."
            )

    @property
    def total_length(self) -> int:
        """Batches of all processes."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Tells the batch sampler, where it wants to know."""
        _tell_epoch(self.batch_sampler, epoch)

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        groups, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last:
            return groups
        has_last = rest > 0 if self.even_batches else self.process_index < rest
        return groups + has_last

    def shares(self) -> Iterator[Share]:
        """What this process loads at each step, and what the others do; also steps at which this one has nothing."""
        width, index, size = self.num_processes, self.process_index, self.batch_size
        ways = {"drop_last": self.drop_last, "even": self.even_batches}
        if self.split_batches:
            return shares_of_split_batches(self.batch_sampler, width, index, size, **ways)
        return shares_of_whole_batches(self.batch_sampler, width, index, size, **ways)

    def __iter__(self) -> Iterator[list[Any]]:
        for share in self.shares():
            if share.indices:
                yield list(share.indices)


class SamplerShard(BatchSamplerShard):
    """The samples of one process out of those of a sampler, for a loader without automatic batching: batches of one."""

    def __iter__(self) -> Iterator[Any]:
        for indices in super().__iter__():
            yield indices[0]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: the whole one.
        skip_batches: how many are left out.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """Batches of the whole one."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Tells the batch sampler, where it wants to know."""
        _tell_epoch(self.batch_sampler, epoch)

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


class IterableDatasetShard(IterableDataset[Any]):
    """The rows of one process out of those of an iterable dataset; a short end is filled with the first rows.

    Args:
        dataset: gives the rows of all processes.
        batch_size: rows of one process at a step (with `split_batches`: of all processes).
        drop_last: leaves a short end out.
        num_processes, process_index: how many there are, and which one this is.
        split_batches: says what `batch_size` counts.

    Attributes:
        num_real: rows of all processes, at the step read last, that are no filler.

    Raises:
        ValueError: where batches are to be split and cannot.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ValueError(
                f"Batches of {batch_size} cannot be split over {num_processes} processes: with split_batches=True "
                f"the batch size is a multiple of the number of processes."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.num_real = 0

    def set_epoch(self, epoch: int) -> None:
        """Tells the dataset, where it wants to know."""
        self.epoch = epoch
        _tell_epoch(self.dataset, epoch)

    @property
    def rows(self) -> int:
        """Rows of this process at a step."""
        return max(1, self.batch_size // self.num_processes) if self.split_batches else self.batch_size

    def __len__(self) -> int:
        steps, rest = divmod(len(self.dataset), self.batch_size * self.num_processes)
        has_last = rest > 0 and not self.drop_last
        return (steps + has_last) * self.batch_size

    def __iter__(self) -> Iterator[Any]:
        shares = shares_of_stream(
            self.dataset, self.num_processes, self.process_index, self.rows, drop_last=self.drop_last
        )
        for rows, self.num_real in shares:
            yield from rows


def _tell_epoch(sampler: object, epoch: int) -> None:
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single samples behind a loader; None where there is none."""
    holder = _holder_of_sampler(dataloader)
    return None if holder is None else getattr(holder, "sampler", None)


def _holder_of_sampler(dataloader: DataLoader[Any]) -> Any:
    """The innermost batch sampler."""
    is_batched = isinstance(dataloader.sampler, BatchSampler)
    holder: Any = dataloader.sampler if is_batched else dataloader.batch_sampler
    while hasattr(holder, "batch_sampler"):
        holder = holder.batch_sampler
    return holder


def set_sampler(dataloader: Any, sampler: Any) -> None:
    """Puts another sampler in the place of the one that `get_sampler` gives."""
    _holder_of_sampler(dataloader).sampler = sampler
