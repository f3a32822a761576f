"""What we rely on of `DataLoader`'s private names: a contract a function."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
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


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so of every profiler
def test_batches_without_a_span_are_the_same_and_have_one_while_somebody_profiles() -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(5), batch_size=2)
    assert [batch.tolist() for batch in loaders.unrecorded(iter(loader))] == [[0, 1], [2, 3], [4]]
    batches = loaders.unrecorded(iter(loader))
    next(batches)
    with torch.profiler.profile() as profile:
        next(batches)
    spans = [event for event in profile.events() if "DataLoader" in event.name]
    assert len(spans) == 1


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
        list(loaders.unrecorded(iter(loader)))


def _count_samples(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Which samples a `TensorDataset` was asked for, one by one."""
    asked: list[Any] = []
    read = TensorDataset.__getitem__

    def noted(dataset: TensorDataset, index: Any) -> Any:
        asked.append(index)
        return read(dataset, index)

    monkeypatch.setattr(TensorDataset, "__getitem__", noted)
    return asked


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_rows_of_tensors_are_read_by_one_look_up(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _count_samples(monkeypatch)
    dataset = TensorDataset(torch.arange(30).view(5, 3, 2).to(dtype), torch.arange(5))
    loader = DataLoader(dataset, batch_size=2)
    expected = list(loader)
    asked.clear()
    batches = list(loaders.unrecorded(iter(loader)))
    assert asked == []
    for batch, plain in zip(batches, expected, strict=True):
        assert type(batch) is type(plain)
        for tensor, other in zip(batch, plain, strict=True):
            assert torch.equal(tensor, other) and (tensor.dtype, tensor.stride()) == (other.dtype, other.stride())


def test_rows_that_only_their_own_way_reads_right_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _count_samples(monkeypatch)
    rows = torch.arange(12.0).view(4, 3)
    transposed = torch.arange(12.0).view(3, 4).t()
    for loader in (
        DataLoader(TensorDataset(transposed), batch_size=2),
        DataLoader(TensorDataset(rows.clone().requires_grad_()), batch_size=2),
        DataLoader(TensorDataset(rows), batch_size=2, collate_fn=len),
        DataLoader(TensorDataset(rows), batch_sampler=[[slice(0, 2)], [slice(2, 4)]]),  # type: ignore[list-item]
        DataLoader(TensorDataset(rows), batch_size=None),
    ):
        plain = list(loader)
        asked.clear()
        assert str(list(loaders.unrecorded(iter(loader)))) == str(plain)
        assert asked


def test_datasets_of_loops_under_way_are_found() -> None:
    here, elsewhere = Numbers(2), Numbers(2)
    iterator = iter(DataLoader(here))
    DataLoader(elsewhere)
    in_use = [id(dataset) for dataset in loaders.datasets_in_use()]
    assert id(here) in in_use and id(elsewhere) not in in_use
    del iterator


def test_a_dataset_hears_what_was_set() -> None:
    shown = object()
    loaders.set_worker_info(shown)
    try:
        assert get_worker_info() is shown
    finally:
        loaders.set_worker_info(None)
    assert get_worker_info() is None
    assert torch.utils.data.get_worker_info() is None
