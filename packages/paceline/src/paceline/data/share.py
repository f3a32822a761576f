"""Iterable datasets: each rank and each worker takes its own rows of the one stream, without duplicates.

    stream     0 1 2 3 4 5 6 7 | 8 9 ...        global batches of `global_batch` consecutive samples
    rank 0     0 1 2 3         | 8 9 ...        rows [0, micro_batch) of each: the order is that of one process,
    rank 1             4 5 6 7 |                at every width and with every number of workers
    worker w   every `num_workers`-th global batch, from the w-th on; a DataLoader asks its workers in turn

A dataset that splits itself, by reading torch's worker information, is left to do so: it is shown width x num_workers
workers, and whatever it then gives is taken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data.feed import NOTHING
from paceline.data.order import mix
from paceline.data.streams import PrivateStreams, States
from paceline.plan.data import DataPlan
from paceline.torch_internals.loaders import set_worker_info
from paceline.world.tree import common_rows

_END = object()


def skip(samples: Iterator[Any], count: int) -> None:
    """Reads over `count` samples, or to the end."""
    if count > 0:
        next(islice(samples, count, count), None)


class ShownWorker:
    """What `torch.utils.data.get_worker_info()` returns to a dataset while we read from it.

    Attributes:
        asked: whether the dataset has looked at `id` or `num_workers`, which it does to split itself.
    """

    def __init__(self, id: int, num_workers: int, seed: int, dataset: object) -> None:
        self.seed = seed
        self.dataset = dataset
        self.asked = False
        self._id = id
        self._num_workers = num_workers

    @property
    def id(self) -> int:
        """Number of this worker among those of all ranks."""
        self.asked = True
        return self._id

    @property
    def num_workers(self) -> int:
        """Workers of all ranks together."""
        self.asked = True
        return self._num_workers


class Share(IterableDataset[Any]):
    """The samples of a dataset that one worker of one rank loads.

    Args:
        dataset: the user's.
        plan: global batch, width, index and seed.
        own: the dataset holds this rank's samples alone, cut by its `shard`.
        asks: whether the dataset may split itself; otherwise its whole stream is read everywhere.
        shared: whether `now` must be seen by workers that live longer than an epoch.
    """

    def __init__(
        self, dataset: Any, plan: DataPlan, own: bool = False, asks: bool = True, shared: bool = False
    ) -> None:
        self.dataset = dataset
        self.seed = plan.seed
        self.drawn = plan.drawn
        self.replayed: States | None = None  # from which the samples that are read over were drawn
        self.own = own
        self.asks = asks
        rows = plan.rows(plan.global_batch)
        self.per_batch = rows[plan.index]
        # Samples of the stream at one step, and those of them that ranks before this one read.
        self.batch = plan.global_batch
        self.before = sum(rows[: plan.index])
        self.width = plan.width
        self.index = plan.index
        if own:
            # The dataset is this rank's part already, so that there is nobody to share it with.
            self.batch = self.per_batch
            self.before = 0
            self.width = 1
            self.index = 0
        self.now = torch.zeros(2, dtype=torch.int64)  # epoch, global samples to leave out
        if shared:
            self.now.share_memory_()
        self.stateful = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self.state: tuple[int, Any] | None = None  # samples read when it was taken, and the dataset's own state
        self.epoch_has_ended = False  # whether that state was taken after the last sample of the epoch
        self.splits_itself = own
        self.first: Any = _END  # the stream's first sample, as this rank has read it; only where no worker reads
        self._read = 0

    def take_first(self) -> list[Any]:
        """Returns the stream's first sample, and lets go of it; nothing where it was not read here."""
        first, self.first = self.first, _END
        return [] if first is _END else [first]

    def note(self) -> Mapping[str, Any]:
        """What a resume after the sample that was read last needs; asked by the collation, where the worker is."""
        if self.splits_itself:
            return {"splits_itself": True}
        if self.stateful:
            return {"dataset": [self._read, copy.deepcopy(self.dataset.state_dict())]}
        return NOTHING

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.now.tolist()
        if self.own:
            start = 0  # a global count says nothing of our part: the feed reads over batches instead
        set_epoch = getattr(self.dataset, "set_epoch", None)
        generator = getattr(self.dataset, "generator", None)
        if callable(set_epoch):
            set_epoch(epoch)
        elif isinstance(generator, torch.Generator) and not self.drawn:
            generator.manual_seed(mix(self.seed, epoch))
        skipped = 0  # samples that the dataset's own state leaves out, which it is given once
        if self.state is not None:
            skipped, state = self.state
            self.state = None
            self.dataset.load_state_dict(state)
            if self.epoch_has_ended:
                return self._rest_of_ended_epoch(start - skipped, state)
        info = get_worker_info()
        num_workers = 1
        worker = 0
        if info is not None:
            num_workers = info.num_workers
            worker = info.id
        if self.width * num_workers == 1:
            return self._all(start, skipped)
        return self._part(start, skipped, worker, num_workers)

    def _drawing_again(self) -> AbstractContextManager[None]:
        """The streams from which samples are drawn that were drawn before, in the run that saved the position."""
        states = self.replayed
        self.replayed = None
        return nullcontext() if states is None else PrivateStreams(states).drawing()

    def _rest_of_ended_epoch(self, left: int, state: Any) -> Iterator[Any]:
        """Returns no samples, and leaves the dataset as it is after an epoch.

        Some datasets go back to their beginning when they end, so that their state is that of the next epoch. Others do it
        when they are read once more and have nothing left.

        Args:
            left: samples that other ranks have read, after those that the state leaves out.
            state: the dataset's own state, which it has got.
        """
        samples = iter(self.dataset)
        skip(samples, left)
        if next(samples, _END) is not _END:
            self.dataset.load_state_dict(state)
        return iter(())

    def _all(self, start: int, skipped: int) -> Iterator[Any]:
        """Yields all samples: there is one rank and one worker. A dataset that asks sees torch's own worker information."""
        with self._drawing_again():
            samples = iter(self.dataset)
            skip(samples, start - skipped)
        self._read = start
        return self._counted(samples) if self.stateful else samples

    def _counted(self, samples: Iterator[Any]) -> Iterator[Any]:
        for sample in samples:
            self._read += 1
            yield sample

    def _part(self, start: int, skipped: int, worker: int, num_workers: int) -> Iterator[Any]:
        """Yields the samples of one worker of this rank.

        Args:
            start: the global samples that were used in this epoch.
            skipped: how many of these the dataset's own state leaves out already.
            worker, num_workers: the number of this worker, and of all workers of this rank.
        """
        real = get_worker_info()
        seed = 0 if real is None else real.seed
        shown = ShownWorker(self.index * num_workers + worker, self.width * num_workers, seed, self.dataset)
        whole = ShownWorker(0, 1, seed, self.dataset)
        samples = Shown(self.dataset, shown if self.asks else whole, real)
        samples_before = worker * self.batch + self.before  # of a round of all workers' batches
        num_skipped = start - skipped + samples_before
        with self._drawing_again():
            # Most datasets ask for the worker only when the first sample is drawn, so that it must be drawn to know.
            first = next(samples, _END)
            if first is not _END and not shown.asked and start > skipped:
                samples.info = whole
                skip(samples, start - skipped - 1)
        if shown.asked:
            # It has split itself: all that it gives is ours.
            self.splits_itself = True
            if first is not _END:
                yield first
            yield from samples
            return
        if real is None and not start:
            self.first = first
        samples.info = whole  # should it ask later, it must not begin to split
        self._read = max(start, skipped) + samples_before + self.per_batch
        if first is _END:
            return
        if num_skipped > 0:
            # Of these, one has been read already, and those of an earlier run.
            skip(samples, num_skipped - max(1, start - skipped))
            first = next(samples, _END)
        while first is not _END:
            yield first
            yield from islice(samples, self.per_batch - 1)
            skip(samples, num_workers * self.batch - self.per_batch)
            self._read += num_workers * self.batch
            first = next(samples, _END)


class Shown:
    """A dataset's iterator that sees our worker information while it runs, and nobody else does."""

    def __init__(self, dataset: Iterable[Any], info: ShownWorker, real: object) -> None:
        self.info = info
        self.real = real
        set_worker_info(info)
        try:
            self._samples = iter(dataset)
        finally:
            set_worker_info(real)

    def __iter__(self) -> Shown:
        return self

    def __next__(self) -> Any:
        set_worker_info(self.info)
        try:
            return next(self._samples)
        finally:
            set_worker_info(self.real)


class Counted:
    """A collation that tells how many rows it has collated, and what a resume after them needs; runs in the workers.

    Args:
        collate: the user's.
        share: the stream that the samples come from; in a worker, the worker's own copy of it.
        batched: whether a list of samples comes, or one item that counts the rows that all its tensors have.
    """

    def __init__(self, collate: Callable[[Any], Any], share: Share, batched: bool) -> None:
        self.collate = collate
        self.share = share
        self.batched = batched

    def __call__(self, samples: Any) -> tuple[int, Mapping[str, Any], Any]:
        note = self.share.note()
        if self.batched:
            return len(samples), note, self.collate(samples)
        batch = self.collate(samples)
        # Without automatic batching an item may be a whole batch. It is one if all its tensors have the same length.
        return common_rows(batch) or 1, note, batch
