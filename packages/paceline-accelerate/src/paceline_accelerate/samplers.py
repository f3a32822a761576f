"""accelerate's samplers and iterable dataset: each yields the part of one process, as `sample_order` divides an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from paceline_accelerate.sample_order import (
    Step,
    groups_of_stream,
    steps_of_split_batches,
    steps_of_whole_batches,
)


def unequal_parts(batch_size: int | None, num_processes: int) -> ValueError:
    """Returns the error for batches that cannot be split over the processes."""
    return ValueError(
        f"split_batches=True: the batch size ({batch_size}) needs to be a round multiple of the number of processes "
        f"({num_processes})."
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
        if data_seed is None:
            data_seed = torch.random.initial_seed()
        self.initial_seed = data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator(device=torch.get_default_device())
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        # A loop that leaves the sampler before its end does not get here, and the next loop draws the same order again.
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next one."""
        self.epoch = epoch


class _OverBatchSampler(BatchSampler):
    """A batch sampler that takes its batches from another one, `batch_sampler`."""

    batch_sampler: Any

    @property
    def total_length(self) -> int:
        """The number of all batches, also of those that are left out here."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the epoch on."""
        set_epoch_of(self.batch_sampler, epoch)


class BatchSamplerShard(_OverBatchSampler):
    """Yields the batches of one process, taken from those of a batch sampler.

    Args:
        batch_sampler: yields the batches of all processes.
        num_processes, process_index: number of processes, and the number of this one.
        split_batches: whether each batch is cut over the processes; if not, the processes take whole batches in turn.
        even_batches: whether all processes load the same number of samples; where the end of the epoch has too few, samples
            of its beginning are repeated.

    Raises:
        ValueError: if batches cannot be split evenly.
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
        # A batch sampler that a script wrote need not have these two attributes.
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches and (self.batch_size is None or self.batch_size % num_processes):
            raise unequal_parts(self.batch_size, num_processes)

    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        full, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or not rest:
            return full
        # The last step has batches for the first `rest` processes; to be even, the others repeat samples.
        has_batch = self.even_batches or self.process_index < rest
        return full + has_batch

    def steps(self) -> Iterator[Step]:
        """Yields what all processes load, step by step."""
        steps_of: Any = steps_of_whole_batches
        if self.split_batches:
            steps_of = steps_of_split_batches
        steps: Iterator[Step] = steps_of(
            self.batch_sampler, self.num_processes, self.batch_size, drop_last=self.drop_last, even=self.even_batches
        )
        return steps

    def __iter__(self) -> Iterator[list[Any]]:
        for step in self.steps():
            samples = step.parts[self.process_index]
            # Empty at a last step that is not filled up and does not reach to this process.
            if samples:
                yield list(samples)


class SamplerShard(BatchSamplerShard):
    """Yields single samples of one process, for a loader without automatic batching.

    It is constructed with a batch sampler whose batches hold one sample.
    """

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch[0]


class SkipBatchSampler(_OverBatchSampler):
    """Yields the batches of a batch sampler without the first ones.

    Args:
        batch_sampler: yields all batches.
        skip_batches: how many batches are skipped.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)


class IterableDatasetShard(IterableDataset[Any]):
    """Yields the samples of one process, taken from those of an iterable dataset.

    If the dataset has an attribute `generator` but no `set_epoch`, the generator is seeded with the number of the epoch.

    Args:
        dataset: yields the samples of all processes.
        batch_size: batch size of one process, or with `split_batches` of all processes together.
        drop_last: whether an incomplete last step is dropped; if not, it is filled up with the epoch's first samples.
        num_processes, process_index: number of processes, and the number of this one.
        split_batches: whether `batch_size` is that of all processes together.

    Attributes:
        num_real: number of real samples, over all processes, in the step that is being read.
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
            raise unequal_parts(batch_size, num_processes)
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
        """The number of samples of one process at a step."""
        if not self.split_batches:
            return self.batch_size
        return max(1, self.batch_size // self.num_processes)

    def set_epoch(self, epoch: int) -> None:
        """Passes the number of the epoch on."""
        self.epoch = epoch
        set_epoch_of(self.dataset, epoch)

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
        # The loop sets `num_real` before it yields: `collate_fn` reads it for the batch that it gets.
        for samples, self.num_real in groups:
            yield from samples[begin : begin + self.rows]


def set_epoch_of(holder: object, epoch: int) -> None:
    """Calls `set_epoch` of a sampler or a dataset if it has the method."""
    set_epoch = getattr(holder, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def get_sampler(dataloader: Any) -> Any:
    """Returns the sampler of single samples of a loader; None where there is none."""
    return getattr(_holder_of_sampler(dataloader), "sampler", None)


def set_sampler(dataloader: Any, sampler: Any) -> None:
    """Replaces the sampler that `get_sampler` returns."""
    # A DataLoader refuses to have `sampler` assigned after its construction, so its dictionary is written.
    vars(_holder_of_sampler(dataloader))["sampler"] = sampler


def _holder_of_sampler(dataloader: Any) -> Any:
    """Returns the innermost batch sampler, or the loader itself if it has no automatic batching."""
    holder = dataloader.batch_sampler
    if holder is None:
        holder = dataloader
        # Without automatic batching a script may still have passed a batch sampler, as `sampler=`.
        if isinstance(dataloader.sampler, BatchSampler):
            holder = dataloader.sampler
    while getattr(holder, "batch_sampler", None) is not None:
        holder = holder.batch_sampler
    return holder
