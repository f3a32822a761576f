"""`accelerate.data_loader`: its functions. The classes are in `loader_classes`, the samplers in `samplers`.

prepare_data_loader   a DataLoader -> BatchSamplerShard or IterableDatasetShard -> DataLoaderShard
                                   -> rank 0 reads for all                      -> DataLoaderDispatcher
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.data.active import ActiveLoaders
from paceline.data.loader import PreparedLoader
from paceline.data.prepare import prepare_loader
from paceline.data.skip import SkippedLoader
from paceline.plan.data import Tail
from paceline.torch_internals.loaders import copy_with
from paceline.world.collectives import Collectives
from paceline_accelerate.kinds import text_of
from paceline_accelerate.loader_classes import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    batch_size_of,
)
from paceline_accelerate.loader_feed import OwnShardsFeed
from paceline_accelerate.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
    set_sampler,
    unequal_parts,
)
from paceline_accelerate.state import PartialState
from paceline_accelerate.stateful_loader import KEYWORDS


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Returns a loader without the first `num_batches` batches; a dataset with indices is not read in order to skip.

    For a prepared loader the result is a view of it: only epochs that are iterated through this view are shortened.
    """
    if type(dataloader) is SkippedLoader:
        return SkippedLoader(dataloader.loader, dataloader.count + num_batches)
    if isinstance(dataloader, PreparedLoader):
        return SkippedLoader(dataloader, num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        keywords = {name: getattr(dataloader, name) for name in ("batch_size", "drop_last", *KEYWORDS)}
        return SkipDataLoader(dataloader.dataset, skip_batches=num_batches, **keywords)
    if dataloader.batch_sampler is None:
        return copy_with(dataloader, {"sampler": SkipBatchSampler(dataloader.sampler, num_batches)})
    return copy_with(dataloader, {"batch_sampler": SkipBatchSampler(dataloader.batch_sampler, num_batches)})


def prepare_data_loader(
    dataloader: DataLoader[Any],
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
    torch_device_mesh: object = None,
    *,
    collectives: Collectives | None = None,
    active: ActiveLoaders | None = None,
) -> Any:
    """Returns a loader over one process's part of what `dataloader` reads; the other arguments are accelerate's.

    Args:
        collectives: collectives of the processes that read different samples; they are used for dispatch.
        active: the loaders that are being iterated, to which the loader adds itself.

    Ranks: all, in the same order.

    Raises:
        ValueError: if batches cannot be split, or if `dispatch_batches` is asked for without `put_on_device`.
    """
    # The processes. Making a `PartialState` initializes the process group, so none is made if the caller passes everything.
    if num_processes is None or process_index is None or device is None or collectives is None:
        state = PartialState()
        num_processes = state.num_processes if num_processes is None else num_processes
        process_index = state.process_index if process_index is None else process_index
        device = device or state.device
        collectives = collectives or state.collectives
    is_stream = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and is_stream
    if dispatch_batches and not put_on_device:
        raise ValueError("`dispatch_batches=True` requires `put_on_device=True`: batches are sent to devices.")
    if split_batches:
        _check_split(dataloader, num_processes)
    options: dict[str, Any] = {
        "use_stateful_dataloader": use_stateful_dataloader,
        "drop_last": dataloader.drop_last,
        "device": device if put_on_device else None,
        "active": active,
        "non_blocking": non_blocking,
    }
    # The dataset divides itself among the processes.
    has_shards_for_all = is_stream and not split_batches and _own_shards(dataloader.dataset) >= num_processes
    if has_shards_for_all and num_processes > 1 and not dispatch_batches:
        return _over_own_shards(dataloader, num_processes, process_index, collectives, options)
    # Rank 0 reads for all.
    base, sampler = _copied(dataloader, use_seedable_sampler, data_seed)
    seed = getattr(sampler, "initial_seed", 0)
    if dispatch_batches:
        return DataLoaderDispatcher.over(
            copy_with(base, {"generator": None}),
            num_processes,
            process_index,
            collectives,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            seed=seed,
            **options,
        )
    # Each process reads its part.
    generator = None
    if num_processes > 1:
        generator = _generator_of(dataloader, sampler, use_seedable_sampler)
        base = _part_of(base, num_processes, process_index, split_batches, even_batches)
    streams = _synchronized_streams(rng_types, generator)
    shard = DataLoaderShard.over(base, rng_types=streams, synchronized_generator=generator, **options)
    shard.feed.reseed(seed)
    return shard


def _over_own_shards(
    dataloader: DataLoader[Any], width: int, index: int, collectives: Collectives, options: Mapping[str, Any]
) -> DataLoaderShard:
    """Returns a loader over a dataset that can divide itself, such as one of `datasets` with several shards.

    Shards may differ in length, so one process may have fewer samples than another. Paceline's own loader reads them, because
    its processes agree at each step whether the epoch goes on.
    """
    tail: Tail = "drop" if dataloader.drop_last else "pad"
    device = options["device"] or "cpu"
    native = prepare_loader(dataloader, width=width, index=index, device=device, tail=tail, collectives=collectives)
    feed = OwnShardsFeed(native.original, native.plan, collectives, options["use_stateful_dataloader"])
    return DataLoaderShard.over(native.original, feed=feed, **options)


def _copied(dataloader: DataLoader[Any], seedable: bool, data_seed: int | None) -> tuple[DataLoader[Any], Any]:
    """Returns a copy of the loader, and its sampler of single samples, which is a seedable one if `seedable`."""
    # These are the values that DataLoader itself sets when it is constructed with a batch sampler.
    attributes: dict[str, Any] = {}
    if dataloader.batch_sampler is not None and not isinstance(dataloader.dataset, IterableDataset):
        in_order = SequentialSampler(dataloader.dataset)  # type: ignore[arg-type]
        attributes = {"batch_size": None, "drop_last": False, "sampler": in_order}
    base = copy_with(dataloader, attributes)
    sampler = get_sampler(dataloader)
    if not seedable or not isinstance(sampler, RandomSampler):
        return base, sampler
    # torch's sampler returns the length of the dataset if no `num_samples` was given; only another number was the script's.
    num_samples = None
    if sampler.num_samples != len(sampler.data_source):
        num_samples = sampler.num_samples
    sampler = SeedableRandomSampler(
        sampler.data_source, sampler.replacement, num_samples, sampler.generator, data_seed=data_seed
    )
    # The new sampler goes into a copy, so that the script's own batch sampler is not changed.
    if base.batch_sampler is not None:
        base = copy_with(base, {"batch_sampler": copy.copy(base.batch_sampler)})
    else:
        base = copy_with(base, {"sampler": copy.copy(base.sampler)})
    set_sampler(base, sampler)
    return base, sampler


def _generator_of(dataloader: DataLoader[Any], sampler: Any, seedable: bool) -> torch.Generator | None:
    """Returns the generator that is synchronized, so that all processes draw one order; a sampler without one gets one."""
    if isinstance(dataloader.dataset, IterableDataset):
        generator: torch.Generator | None = getattr(dataloader.dataset, "generator", None)
        return generator
    if seedable or not hasattr(sampler, "generator"):
        return None
    # torch's sampler would draw a new seed in each epoch, and every process another one.
    if sampler.generator is None:
        sampler.generator = torch.Generator(device=torch.get_default_device())
        seed = torch.empty((), dtype=torch.int64).random_()
        sampler.generator.manual_seed(int(seed))
    return sampler.generator  # type: ignore[no-any-return]


def _synchronized_streams(rng_types: Sequence[Any] | None, generator: torch.Generator | None) -> list[Any]:
    """Returns the random streams that are synchronized; the one named "generator" only if the loader has a generator."""
    streams = list(rng_types or ())
    if generator is not None:
        return streams
    return [stream for stream in streams if text_of(stream) != "generator"]


def _part_of(base: DataLoader[Any], width: int, index: int, split: bool, even: bool) -> DataLoader[Any]:
    """Returns a loader over the part of one process."""
    if isinstance(base.dataset, IterableDataset):
        batch = base.batch_size or 1
        part = IterableDatasetShard(base.dataset, batch, bool(base.drop_last), width, index, split)
        if base.batch_size is None:
            return copy_with(base, {"dataset": part})
        batches = BatchSampler(base.sampler, part.rows, bool(base.drop_last))
        return copy_with(base, {"dataset": part, "batch_sampler": batches, "batch_size": part.rows})
    if base.batch_sampler is not None:
        return copy_with(base, {"batch_sampler": BatchSamplerShard(base.batch_sampler, width, index, split, even)})
    if isinstance(base.sampler, BatchSampler):
        return copy_with(base, {"sampler": BatchSamplerShard(base.sampler, width, index, split, even)})
    # Without automatic batching each process takes one item of each `width`.
    single = SamplerShard(BatchSampler(base.sampler, 1, drop_last=False), width, index, split, even)
    return copy_with(base, {"sampler": single})


def _check_split(dataloader: DataLoader[Any], width: int) -> None:
    """Checks that a batch can be split over the processes.

    Raises:
        ValueError: if the batch size is no multiple of their number, or there is no batch size.
    """
    batch = batch_size_of(dataloader)
    if batch is None:
        raise ValueError("split_batches=True needs a batch size: neither the loader nor its batch sampler has one.")
    if batch > 1 and batch % width:
        raise unequal_parts(batch, width)


def _own_shards(dataset: Any) -> int:
    """Returns the number of shards of a dataset of the library `datasets`; 0 for any other dataset."""
    if not callable(getattr(dataset, "shard", None)):
        return 0
    # Before datasets 3.0 the attribute was `n_shards`.
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", 0))
    if not isinstance(count, int):
        return 0
    return count
