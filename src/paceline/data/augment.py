"""Random numbers that a dataset draws in loader workers (augmentation): a pure function of seed, epoch and place.

    main process   Indices(indices, key of the epoch, place of the first) -> a worker
    worker         for each sample: seed random, numpy and torch with (key, its place in the epoch) -> dataset[index]

So a sample is augmented alike at every width, with any number of workers, and after a resume. Without workers a dataset
draws from the process's own streams, as in any loop, and a checkpoint holds those.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.data.order import mix


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
    """A dataset, in workers, that is given `Indices`; one that takes whole batches draws for each batch.

    Args:
        dataset: the user's.
        scalar: it is given the one index of each batch, and no list.
    """

    def __init__(self, dataset: Any, scalar: bool) -> None:
        self.dataset = dataset
        self.scalar = scalar

    def __getitem__(self, indices: Indices) -> Any:
        # torch calls this without automatic batching, with one entry of the sampler, and `__getitems__` otherwise.
        indices.seed(0)
        return self.dataset[indices[0] if self.scalar else list(indices)]

    def __getitems__(self, indices: Indices) -> list[Any]:
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
