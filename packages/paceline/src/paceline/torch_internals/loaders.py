"""The private side of `DataLoader`: copies of it, its iterators, and what a dataset can learn about its worker."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from torch.utils.data import DataLoader
from torch.utils.data._utils import worker as worker_module
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter


def copy_with(loader: DataLoader[Any], attributes: Mapping[str, Any]) -> DataLoader[Any]:
    """Returns a copy of `loader` with other attributes and without its iterator. The class may be any subclass.

    `DataLoader` refuses to change the attributes that its constructor checks against each other, so that a copy is needed.
    """
    copied = copy.copy(loader)
    # The last one is the length that an iterable dataset reported earlier; torch warns if it then yields more samples.
    copied.__dict__.update(attributes, _iterator=None, _IterableDataset_len_called=None)
    return copied


def end_workers(loader: DataLoader[Any]) -> None:
    """Makes the next epoch begin with new workers, even if `persistent_workers` would keep the old ones."""
    loader._iterator = None


def has_iterator(loader: DataLoader[Any]) -> bool:
    """Returns whether the loader keeps an iterator for its next epoch, as it does with persistent workers."""
    return loader._iterator is not None


def naming_dead_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """Returns the batches of a DataLoader's iterator; an error names the worker processes that have died.

    Args:
        batches: an iterator of any kind.
    """
    if isinstance(batches, _MultiProcessingDataLoaderIter):
        return _naming_dead_workers(batches)
    return batches


def _naming_dead_workers(batches: _MultiProcessingDataLoaderIter) -> Iterator[Any]:
    try:
        yield from batches
    except (OSError, EOFError) as error:
        # A worker that dies while it hands a tensor over closes its connection first. torch looks for dead workers too early
        # then, and its error names the connection only.
        workers: Sequence[BaseProcess] = batches._workers
        ending = wait([worker.sentinel for worker in workers], timeout=1.0)
        for worker in workers:
            if worker.sentinel in ending:
                worker.join(timeout=1.0)
                text = f"DataLoader worker (pid {worker.pid}) exited unexpectedly, with exit code {worker.exitcode}."
                raise RuntimeError(text) from error
        raise


def datasets_in_use() -> list[Any]:
    """The datasets of all DataLoaders that are being iterated in this process."""
    # `isinstance` reads `__class__` of each object, and some objects warn when any attribute is read.
    iterators = (value for value in gc.get_objects() if issubclass(type(value), _BaseDataLoaderIter))
    return [iterator._dataset for iterator in iterators]


def set_worker_info(info: object) -> None:
    """Sets what `torch.utils.data.get_worker_info()` returns in this process."""
    worker_module._worker_info = cast(Any, info)
