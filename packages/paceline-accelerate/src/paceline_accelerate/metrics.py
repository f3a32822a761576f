"""Gathering for metrics as accelerate does it: over real samples, with as many values as accelerate gives."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor

from paceline.run.run import Run
from paceline.world.tree import has_only_tensors, leaves, map_tensors
from paceline_accelerate.loader_classes import DataLoaderDispatcher
from paceline_accelerate.operations import gather, gather_object


def gather_for_metrics(run: Run, input_data: object, use_gather_object: bool = False) -> Any:
    """Gathers the values of all ranks for the current batch, without those of filler samples.

    Ranks: all.
    """
    gathered = input_data
    are_objects = use_gather_object
    # Ranks that share a batch (tensor parallel) compute the same values, so only ranks with different data are gathered.
    readers = run.data_ranks
    if readers.size > 1:
        are_objects = use_gather_object or not has_only_tensors(input_data)
        if readers.size == run.world.size:
            gathered = gather_object(input_data) if are_objects else gather(input_data)
        elif are_objects:
            gathered = list(chain.from_iterable(readers.gather_object(input_data)))
        else:
            gathered = readers.gather(input_data)
    loader = run.active_loaders.top
    if loader is None or loader.current is None or not loader.current.last:
        return gathered
    batch = loader.current
    # Values of a full batch are not cut: scripts repeat a mean loss by the batch size, of which each process has a part only
    # where batches are split. Under dispatch accelerate cuts them all the same.
    is_dispatched = isinstance(loader, DataLoaderDispatcher)
    if batch.full and sum(batch.real) == loader.total_batch_size and not is_dispatched:
        return gathered
    if readers.size == 1:
        are_objects = use_gather_object or not has_only_tensors(input_data)
    return _first_rows(gathered, sum(batch.real), are_objects)


def _first_rows(data: object, count: int, are_objects: bool) -> Any:
    """Returns the first rows of each tensor, or of a list of objects; nothing is cut if one of them has no rows."""
    # One process gathers no objects, and then the script's own tensor is what is cut.
    if are_objects and not isinstance(data, Tensor):
        return data[:count] if isinstance(data, (list, tuple, str)) else data
    if any(leaf.ndim == 0 for leaf in leaves(data)):
        return data
    return map_tensors(lambda leaf: leaf[:count], data)
