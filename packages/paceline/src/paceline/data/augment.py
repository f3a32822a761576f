"""Random numbers that a dataset draws (augmentation) on several ranks: a pure function of seed, epoch and place.

    sampler   Indices(indices, key of the epoch, place of the first) -> whoever loads the batch: a worker, or the process
    there     for each sample: seed random, numpy and torch with (key, its place in the epoch) -> dataset[index]

So a sample is augmented alike at every width above one, with any number of workers, and after a resume. On one process a
dataset draws as under torch: from the process's own streams, or from those of the workers; there a sample's numbers hang on
all samples before it, which several ranks do not load. With a `data_seed`, one process does as several do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, get_worker_info

from paceline.data.order import mix
from paceline.data.streams import captured, restore
from paceline.plan.data import DataPlan


def has_own_streams(plan: DataPlan) -> bool:
    """Returns whether each sample draws from a stream of its own."""
    return plan.width > 1 or not plan.drawn


def draws_nothing(dataset: object) -> bool:
    """Returns whether a dataset is known to draw no random numbers."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


@contextmanager
def _own_states_kept() -> Iterator[None]:
    """Gives a process that loads batches itself its own streams back. A worker has none to keep."""
    if get_worker_info() is not None:
        yield
        return
    states = captured()
    try:
        yield
    finally:
        restore(states)


class Indices(list[Any]):
    """Indices of one batch, which knows the epoch and its place there.

    Attributes:
        key: seed of the epoch.
        place: samples of the epoch before it.
    """

    def __init__(self, indices: Sequence[Any], key: int, place: int) -> None:
        super().__init__(indices)
        self.key = key
        self.place = place

    def __reduce__(self) -> Any:
        return Indices, (list(self), self.key, self.place)

    def seed(self, offset: int) -> None:
        """Seeds what the sample at an offset may draw from."""
        seed = mix(self.key, self.place + offset)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)


class Augmented:
    """A dataset that is given `Indices`; one that takes whole batches draws for each batch.

    Args:
        dataset: the user's.
        scalar: it is given the one index of each batch, and no list.
    """

    def __init__(self, dataset: Any, scalar: bool) -> None:
        self.dataset = dataset
        self.scalar = scalar

    def __getitem__(self, indices: Indices) -> Any:
        # torch calls this without automatic batching, with one entry of the sampler, and `__getitems__` otherwise.
        with _own_states_kept():
            indices.seed(0)
            return self.dataset[indices[0] if self.scalar else list(indices)]

    def __getitems__(self, indices: Indices) -> list[Any]:
        with _own_states_kept():
            return self._samples(indices)

    def _samples(self, indices: Indices) -> list[Any]:
        get_all = getattr(self.dataset, "__getitems__", None)
        if get_all is not None:
            indices.seed(0)
            return list(get_all(list(indices)))
        samples = []
        for offset, index in enumerate(indices):
            indices.seed(offset)
            samples.append(self.dataset[index])
        return samples

    def __len__(self) -> int:
        return len(self.dataset)
