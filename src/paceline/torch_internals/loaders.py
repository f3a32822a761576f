"""The private side of `DataLoader`: copies of it, its iterators, and what a dataset hears of its worker."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.autograd import _profiler_enabled
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate, default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter


def copy_with(loader: DataLoader[Any], attributes: Mapping[str, Any]) -> DataLoader[Any]:
    """A copy of `loader` with other attributes, and without its iterator; of a subclass, which need not know of it.

    The public way, to change an attribute, is refused for those that the constructor checks against each other.
    """
    copied = copy.copy(loader)
    # The last one is the length that an iterable dataset once told; torch warns where it then gives more samples.
    copied.__dict__.update(attributes, _iterator=None, _IterableDataset_len_called=None)
    return copied


def end_workers(loader: DataLoader[Any]) -> None:
    """Lets the next epoch begin with new workers, also where `persistent_workers` would keep the old ones."""
    loader._iterator = None


def unrecorded(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a DataLoader's iterator, without the span that each of them makes in a profile while nobody profiles.

    A `TensorDataset` under torch's own collation is read by one look-up a tensor, which gives the same batches.

    Args:
        batches: of any kind; where other processes read, it is given back as it is.
    """
    if type(batches) is not _SingleProcessDataLoaderIter:
        return batches
    fetcher = batches._dataset_fetcher
    if _reads_plain_tensors(fetcher):
        batches._dataset_fetcher = _RowsFetcher(fetcher)
    return _unrecorded(batches)


def _reads_plain_tensors(fetcher: Any) -> bool:
    """Whether a fetcher takes rows out of contiguous tensors one by one, and stacks them."""
    if type(fetcher) is not _MapDatasetFetcher or type(fetcher.dataset) is not TensorDataset:
        return False
    stacks = fetcher.collate_fn is default_collate and default_collate_fn_map[torch.Tensor] is collate_tensor_fn
    return stacks and fetcher.auto_collation and all(map(_is_plain, fetcher.dataset.tensors))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_strided = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and tensor.is_contiguous() and not tensor.requires_grad


class _RowsFetcher:
    """Stands in the iterator in place of torch's fetcher, which takes 35 us for two tensors and 8 rows; this takes 12 us."""

    def __init__(self, fetcher: Any) -> None:
        self._fetcher = fetcher

    def fetch(self, indices: list[Any]) -> Any:
        if set(map(type, indices)) != {int}:
            return self._fetcher.fetch(indices)
        rows = torch.tensor(indices)
        return [tensor[rows] for tensor in self._fetcher.dataset.tensors]


def _unrecorded(batches: _SingleProcessDataLoaderIter) -> Iterator[Any]:
    # The span alone takes 5 us a batch.
    next_batch: Callable[[], Any] = batches._next_data
    try:
        while True:
            yield next(batches) if _profiler_enabled() else next_batch()
    except StopIteration:
        return


def datasets_in_use() -> list[Any]:
    """The datasets of all DataLoaders that are being iterated in this process."""
    # `isinstance` would ask the objects themselves, some of which warn when they are asked for anything.
    iterators = (value for value in gc.get_objects() if issubclass(type(value), _BaseDataLoaderIter))
    return [iterator._dataset for iterator in iterators]


def set_worker_info(info: object) -> None:
    """Sets what `torch.utils.data.get_worker_info()` returns in this process."""
    worker._worker_info = cast(Any, info)
