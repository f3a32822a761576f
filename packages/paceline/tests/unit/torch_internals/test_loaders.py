"""What we rely on of `DataLoader`'s private names: a contract a function."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
)

from paceline.torch_internals import loaders


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.length


class Generation(Dataset[int]):
    """Its one sample is what `value` was when the worker was made."""

    def __init__(self) -> None:
        self.value = 0

    def __getitem__(self, index: int) -> int:
        return self.value

    def __len__(self) -> int:
        return 1


class Stream(IterableDataset[int]):
    """Gives more samples than it says it has."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 2


def test_a_copy_has_other_attributes_and_the_loader_keeps_its_own() -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(4), batch_size=2)
    pairs = BatchSampler(SequentialSampler(Numbers(6)), 3, drop_last=False)
    copied = loaders.copy_with(loader, {"dataset": Numbers(6), "batch_sampler": pairs})
    assert [batch.tolist() for batch in copied] == [[0, 1, 2], [3, 4, 5]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_copy_forgets_the_length_that_an_iterable_dataset_told() -> None:
    loader: DataLoader[Any] = DataLoader(Stream(), batch_size=None)
    assert len(loader) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loaders.copy_with(loader, {}))) == 4


def test_new_workers_see_what_has_changed() -> None:
    dataset = Generation()
    loader: DataLoader[Any] = DataLoader(dataset, num_workers=1, persistent_workers=True)
    assert [int(batch) for batch in loader] == [0]
    dataset.value = 1
    assert [int(batch) for batch in loader] == [0], "workers that live on have the dataset as it was"
    loaders.end_workers(loader)
    assert [int(batch) for batch in loader] == [1]


def _lose_connection(worker: int) -> None:
    os.kill(worker, signal.SIGKILL)
    raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


class HalfSent:
    """Its worker is killed while this process fetches it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return _lose_connection, (os.getpid(),)


def half_sent(rows: list[int]) -> HalfSent:
    return HalfSent()


def test_a_worker_that_dies_while_it_hands_a_batch_over_is_named() -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(2), num_workers=1, collate_fn=half_sent)
    # torch's handler of SIGCHLD may be faster, and says "is killed by signal".
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) (exited unexpectedly|is killed)"):
        list(loaders.naming_dead_workers(iter(loader)))
