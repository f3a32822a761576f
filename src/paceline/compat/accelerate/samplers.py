"""accelerate's samplers and its view of a stream: each gives one process its part, as `sample_order` divides an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from paceline.compat.accelerate.sample_order import (
    Step,
    groups_of_stream,
    steps_of_split_batches,
    steps_of_whole_batches,
)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is decided by a seed and the number of the epoch.

    Args:
        args, kwargs: as for `RandomSampler`.
        data_seed: the seed; None takes the one that torch was seeded with last.

    Attributes:
        initial_seed: the seed of epoch 0; each epoch adds one.
        epoch: number of the next epoch.
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
    """The batches of one process, out of those of a batch sampler.

    Args:
        batch_sampler: gives the batches of all processes.
        num_processes, process_index: how many processes there are, and which of them this is.
        split_batches: each batch is cut over the processes; else each takes whole batches in turn.
        even_batches: all processes load equally much, with samples of the epoch's beginning where its end does not suffice.

    Raises:
        ValueError: where batches cannot be split evenly.
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
        # A script's own batch sampler need not have either.
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise ValueError(
                f"split_batches=True: the batch size ({self.batch_size}) needs to be a round multiple of the number of "
                f"processes ({num_processes})."
            )

    @property
    def total_length(self) -> int:
        """Batches of all processes."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the epoch on."""
        _pass_on(self.batch_sampler, epoch)

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        full, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or not rest:
            return full
        has_batch = self.even_batches or self.process_index < rest
        return full + has_batch

    def steps(self) -> Iterator[Step]:
        """What all processes load, step by step."""
        steps_of: Any = steps_of_split_batches if self.split_batches else steps_of_whole_batches
        steps: Iterator[Step] = steps_of(
            self.batch_sampler, self.num_processes, self.batch_size, drop_last=self.drop_last, even=self.even_batches
        )
        return steps

    def __iter__(self) -> Iterator[list[Any]]:
        for step in self.steps():
            samples = step.parts[self.process_index]
            if samples:
                yield list(samples)


class SamplerShard(BatchSamplerShard):
    """The samples of one process, for a loader without automatic batching; made of a sampler of batches of one."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch[0]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: gives all batches.
        skip_batches: how many are left out.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    @property
    def total_length(self) -> int:
        """Batches with those that are left out."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the epoch on."""
        _pass_on(self.batch_sampler, epoch)

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process, out of those of an iterable dataset; an end that is short is filled up or dropped.

    A dataset that has no `set_epoch`, and an attribute `generator`, gets this generator seeded with the number of the epoch.

    Args:
        dataset: gives the samples of all processes.
        batch_size: of one process; of all together with `split_batches`.
        drop_last: drops the end; else the epoch's first samples fill it up.
        num_processes, process_index: how many processes there are, and which of them this is.
        split_batches: `batch_size` is that of all processes together.

    Attributes:
        num_real: how many samples of the step that is being read are no filler, over all processes.
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
                f"split_batches=True: the batch size ({batch_size}) needs to be a round multiple of the number of processes "
                f"({num_processes})."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.num_real = 0

    @property
    def rows(self) -> int:
        """Samples of one process at a step."""
        return max(1, self.batch_size // self.num_processes) if self.split_batches else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the epoch on."""
        self.epoch = epoch
        _pass_on(self.dataset, epoch)

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.rows * self.num_processes)
        is_filled = rest > 0 and not self.drop_last
        return (full + is_filled) * self.rows

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        begin = self.rows * self.process_index
        groups = groups_of_stream(self.dataset, self.rows * self.num_processes, drop_last=self.drop_last)
        for samples, self.num_real in groups:
            yield from samples[begin : begin + self.rows]


def _pass_on(holder: object, epoch: int) -> None:
    """Tells a sampler or a dataset the number of the epoch, where it wants to know."""
    set_epoch = getattr(holder, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single samples behind a loader; None where there is none."""
    return getattr(_holder_of_sampler(dataloader), "sampler", None)


def set_sampler(dataloader: Any, sampler: Any) -> None:
    """Puts another sampler in the place of the one that `get_sampler` gives."""
    # Not by assignment: a DataLoader refuses that after its construction.
    vars(_holder_of_sampler(dataloader))["sampler"] = sampler


def _holder_of_sampler(dataloader: Any) -> Any:
    """The innermost batch sampler; the loader itself where it has no automatic batching."""
    holder = dataloader.batch_sampler
    if holder is None:
        # A batch sampler may stand in the sampler's place.
        holder = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader
    while getattr(holder, "batch_sampler", None) is not None:
        holder = holder.batch_sampler
    return holder
