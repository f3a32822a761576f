"""`accelerate.data_loader`: its function on our loader, which stands for each of its classes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset

from paceline.compat.accelerate.state import PartialState
from paceline.data import skip
from paceline.data.active import ActiveLoaders
from paceline.data.loader import PreparedLoader
from paceline.data.prepare import prepare_loader

DataLoaderShard = DataLoaderDispatcher = DataLoaderStateMixin = PreparedLoader


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The loader without the first `num_batches` batches of its epochs."""
    return skip.skip_first_batches(dataloader, num_batches)


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """A loader over this process's part; arguments that change nothing here are taken and ignored.

    Ranks: all; the order's seed is agreed on.
    """
    state = PartialState()
    seed = state.collectives.broadcast_object(torch.initial_seed() if data_seed is None else data_seed)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and isinstance(dataloader.dataset, IterableDataset)
    return prepare_loader(
        dataloader,
        width=state.num_processes if num_processes is None else num_processes,
        index=state.process_index if process_index is None else process_index,
        device=(device or state.device) if put_on_device else torch.device("cpu"),
        seed=int(seed),
        tail="pad" if even_batches else "divide",
        split_batches=split_batches,
        dispatch=dispatch_batches,
        collectives=state.collectives,
        active=ActiveLoaders(),
        non_blocking=non_blocking,
    )
