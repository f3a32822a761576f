"""`prepare_loader`: makes from a DataLoader a loader that reads this rank's part of the samples."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from paceline.base.errors import DataError, Problem
from paceline.data.active import ActiveLoaders
from paceline.data.augment import draws_nothing, has_own_streams
from paceline.data.divided_batches import DividedOrder, divided_sampler
from paceline.data.feed import Feed, MapFeed, Source
from paceline.data.loader import PreparedLoader
from paceline.data.order import Read, check_unsharded, first_entry, order_of, seed_of
from paceline.plan.data import DataPlan, Tail
from paceline.plan.plan import Decision
from paceline.world.collectives import Collectives

if TYPE_CHECKING:
    from paceline.data.stream import StreamFeed


def prepare_loader(
    loader: Any,
    *,
    width: int,
    index: int,
    device: torch.device | str,
    seed: int = 0,
    drawn: bool = False,
    accumulate: int = 1,
    tail: Tail = "divide",
    split_batches: bool = False,
    dispatch: bool | None = None,
    collectives: Collectives | None = None,
    all_ranks: Collectives | None = None,
    active: ActiveLoaders | None = None,
    non_blocking: bool = False,
) -> PreparedLoader:
    """Gives each rank its part of a DataLoader's samples.

    The loader's batch size is that of one rank. A global batch is `batch_size * width` consecutive samples of the loader's
    order; so the same global batch size gives the same batches at every width. Workers, collation, pinning and the rest of
    the DataLoader are kept.

    Args:
        loader: a `torch.utils.data.DataLoader`, or one that is prepared already.
        width, index: how many ranks read different samples, and which share this one reads.
        device: where batches go.
        seed: the seed of the order. The initial seed of a generator of the loader or of its sampler takes its place.
        drawn: each epoch instead draws its order from the random streams of rank 0, exactly as torch's DataLoader does on one
            process. The seed then only decides what datasets draw on several ranks.
        accumulate: micro-batches in one optimizer step; only recorded in the plan.
        tail: how a last global batch that is not full is treated (see `DataPlan`); `drop_last=True` means "drop".
        split_batches: whether the loader's batch size is the global one.
        dispatch: whether rank 0 reads for all ranks and sends each its part; otherwise each rank reads its own.
        collectives: collectives of exactly the `width` ranks that read different samples, in the order of their index.
        all_ranks: collectives of all ranks that must see one order, also of those that read the same samples.
        active: the loaders that are being iterated, to which the loader adds itself.
        non_blocking: whether copies from pinned memory return before they are done.

    Returns:
        The prepared loader; `loader` itself if it was prepared with the same arguments.

    Ranks:
        All. If `collectives` are given and `width` is above one, they first compare their arguments and datasets.

    Raises:
        DataError: `data-loader-kind`, `data-no-length`, `data-empty`, `data-no-batch`, `data-split`,
            `data-sampler-sharded`, `data-ranks-differ`.
    """
    arguments = dict(
        width=width, index=index, device=torch.device(device), seed=seed, drawn=drawn, accumulate=accumulate, tail=tail,
        split_batches=split_batches, dispatch=bool(dispatch), collectives=collectives, all_ranks=all_ranks, active=active,
        non_blocking=non_blocking,
    )  # fmt: skip
    if isinstance(loader, PreparedLoader):
        if loader.arguments == arguments:
            return loader
        loader = loader.original
    _check_kind(loader)
    reads_all = bool(dispatch) and width > 1
    if reads_all and all_ranks is not None and all_ranks.size > width:
        # Several ranks then read for all of their peers, and would each have to draw what rank 0 draws.
        drawn = False
    shared = all_ranks if all_ranks is not None and all_ranks.size > 1 and not reads_all else None
    source: Source | None = None
    if not isinstance(loader.dataset, IterableDataset):
        source = _source(loader, split_batches, shared)
    seed = seed_of(_outer(loader), loader.generator, seed)
    # Problems are not raised here: a rank that stopped alone would leave the others waiting in `_agree`.
    problems = _problems(loader, source, width, split_batches)
    plan = None
    if not problems:
        plan = _plan(loader, source, DataPlan(width, 1, accumulate, width, index, seed, tail, drawn), split_batches)
        problems = _tail_problems(source, plan)
    _agree(problems, plan, source, loader.dataset, bool(dispatch), collectives if width > 1 else None)
    assert plan is not None
    feed = _feed(loader, plan, source, reads_all, collectives, shared)
    active = ActiveLoaders() if active is None else active  # an empty stack is false
    asked: dict[str, Any] = {"batch_size": _sizes(loader)[0], "split_batches": split_batches}
    if source is not None and isinstance(source.order, DividedOrder):
        asked |= source.order.sampler.asked
    return PreparedLoader(loader, feed, torch.device(device), active, non_blocking, arguments, asked)


def random_samples(loader: PreparedLoader) -> Decision | None:
    """Returns the decision on what a dataset draws at random, where that is not always what it draws under torch."""
    plan = loader.plan
    dataset = loader.original.dataset
    by_index = getattr(loader.feed, "by_index", False) and not isinstance(dataset, IterableDataset)
    if not by_index or draws_nothing(dataset):
        return None
    field = f"data.random_samples({type(dataset).__name__})"
    if not has_own_streams(plan):
        if not loader.original.num_workers:
            return None  # the process's own streams are in a checkpoint
        reason = (
            "the streams of the workers are in no checkpoint: if the dataset draws random numbers (augmentation), a run that "
            "goes on in the middle of an epoch draws others there. With num_workers=0, or a data_seed, it draws the same"
        )
        return Decision(field, "from the workers' streams", "derived", reason=reason)
    reason = (
        "if the dataset draws random numbers (augmentation), each sample draws from a stream of its own: alike at every number "
        "of ranks and workers, but not the numbers of one process under torch, where a sample's hang on all samples before it"
    )
    if plan.drawn:
        reason += "; with a data_seed, one process draws like several"
    return Decision(field, "a stream for each sample", "derived", reason=reason)


def own_division(loader: PreparedLoader) -> Decision | None:
    """Returns the decision on how a batch sampler divides its batches itself; None for a loader of another kind."""
    sampler = divided_sampler(loader.original)
    if sampler is None:
        return None
    return sampler.decision(type(loader.original.dataset).__name__, loader.feed.group, loader.plan.width)


def _check_kind(loader: object) -> None:
    if not isinstance(loader, DataLoader):
        raise DataError(
            "data-loader-kind",
            f"an object of type {type(loader).__name__} is no DataLoader, and cannot be prepared as one.",
            why="samples can only be divided if they are known, as those of a torch.utils.data.DataLoader are",
            fix="wrap the dataset: DataLoader(dataset, batch_size=...), or an IterableDataset around a generator",
        )


def _source(loader: DataLoader[Any], split: bool, ranks: Collectives | None) -> Source:
    """Returns the order of an indexed dataset, and how its entries become batches."""
    outer = _outer(loader)
    if _regular(outer):
        return Source(order_of(outer.sampler, loader.generator, ranks))
    divided_by = divided_sampler(loader)
    if divided_by is not None:
        samples = order_of(divided_by.sampler, loader.generator, ranks)
        return Source(divided_by.order(samples), whole=True, split=split)
    # A batch sampler of another class decides itself what is in a batch, so that its batches stay as they are.
    if loader.batch_sampler is not None:
        check_unsharded(outer)
        return Source(Read(outer, loader.generator, ranks, early=True), whole=True, split=split)
    # Without automatic batching, `sampler` may give indices or lists of them. Only its first entry tells.
    order = order_of(outer, loader.generator, ranks, early=True)
    if isinstance(order, Read) and isinstance(first_entry(outer), list):
        return Source(order, whole=True, split=split)
    return Source(order, scalar=True)


def _outer(loader: DataLoader[Any]) -> Any:
    """Returns the sampler that gives the dataset lists of indices; without automatic batching, the one of single indices."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _regular(sampler: Any) -> bool:
    """Returns whether this is torch's own batch sampler: the DataLoader's, or one like it in the sampler's place."""
    return type(sampler).__iter__ is BatchSampler.__iter__


def _sizes(loader: DataLoader[Any]) -> tuple[int | None, bool]:
    """Returns the user's batch size, or None, and whether a last batch that is not full is dropped."""
    outer = _outer(loader)
    return getattr(outer, "batch_size", None), bool(getattr(outer, "drop_last", False)) and _regular(outer)


def _problems(loader: DataLoader[Any], source: Source | None, width: int, split: bool) -> list[Problem]:
    """Returns the problems of the dataset and of the batch size."""
    kind = type(loader.dataset).__name__
    problems = []
    if source is not None and not isinstance(getattr(source.order, "source", ()), Sized):
        problems.append(Problem(
            "data-no-length",
            f"the dataset {kind} has no length.",
            f"{kind} is no IterableDataset, so that its samples are asked for by index; but it has no __len__",
            "give it a __len__, or let it subclass torch.utils.data.IterableDataset",
        ))  # fmt: skip
    elif source is not None and source.order.length() == 0:
        problems.append(Problem(
            "data-empty",
            f"the loader over {kind} gives no samples.",
            f"len(dataset) = {len(cast(Sized, loader.dataset))}; its sampler has no entry for epoch 0",
            "check the path or the filter that the dataset is made with",
        ))  # fmt: skip
    batch, _ = _sizes(loader)
    if split and batch is None and not (source and source.whole):
        problems.append(Problem(
            "data-split",
            "split_batches=True needs batches to split.",
            "the loader has batch_size=None, so that the dataset's items are taken as they are",
            "set a batch size, or split_batches=False",
        ))  # fmt: skip
    elif split and batch is not None and batch % width:
        below = batch - batch % width
        above = below + width
        problems.append(Problem(
            "data-split",
            f"a batch of {batch} cannot be split over {width} ranks.",
            f"batch_size={batch} is the global batch size, because of split_batches=True; {batch} / {width} is not whole",
            f"use batch_size={above}" + (f" or {below}" if below else ""),
        ))  # fmt: skip
    return problems


def _plan(loader: DataLoader[Any], source: Source | None, plan: DataPlan, split: bool) -> DataPlan:
    """Returns the plan with its sizes, and the tail that the loader's own `drop_last` asks for."""
    batch, drop = _sizes(loader)
    if batch is None:
        # An item of a loader without automatic batching is one sample; a sampler's own batches are as long as they are.
        batch = 1
        if source is not None and source.whole:
            first = first_entry(_outer(loader)) if isinstance(_outer(loader), list | tuple) else None
            batch = 1 if first is None else len(first)
    micro = batch
    if split:
        micro = max(1, batch // plan.width)
    tail: Tail = "drop" if drop else plan.tail
    return replace(plan, global_batch=micro * plan.width, micro_batch=micro, tail=tail)


def _tail_problems(source: Source | None, plan: DataPlan) -> list[Problem]:
    length = None if source is None or source.whole else source.order.length()
    if length is None or plan.steps(length):
        return []
    return [Problem(
        "data-no-batch",
        "the loader gives no batch at all.",
        f"it has {length} samples, a global batch takes {plan.global_batch} "
        f"(batch_size={plan.micro_batch} x {plan.width} ranks), and drop_last=True drops a part of one",
        "set drop_last=False, or a smaller batch_size",
    )]  # fmt: skip


def _agree(
    problems: list[Problem],
    plan: DataPlan | None,
    source: Source | None,
    dataset: object,
    dispatch: bool,
    collectives: Collectives | None,
) -> None:
    """Raises the problems of this rank, or an error on every rank if datasets or arguments differ between ranks."""
    if collectives is None:
        if problems:
            raise DataError.of(problems)
        return
    facts: dict[str, Any] = {"problems": [problem.code for problem in problems]}
    if plan is not None:
        facts |= {"seed": plan.seed, "global batch": plan.global_batch, "tail": plan.tail, "dispatch": dispatch}
        facts["kind"] = "iterable" if source is None else "indexed"
    if plan is not None and source is not None:
        facts["length"] = source.order.length()
        if isinstance(source.order, DividedOrder):
            facts |= source.order.sampler.facts
    from paceline.data.beginnings import beginning_of, tell_if_they_differ  # one process has nobody to differ from

    beginning = beginning_of(dataset) if source is not None and not dispatch else None
    # Every rank sends its facts, also one with problems, before any rank raises: otherwise the others would wait for it.
    facts_by_rank = collectives.gather_object({**facts, "beginning": beginning})
    if problems:
        raise DataError.of(problems)
    differences = []
    for name, own_value in facts.items():
        values = [facts_of_rank.get(name) for facts_of_rank in facts_by_rank]
        if any(value != own_value for value in values):
            differences.append(f"{name}: {values}, by rank")
    if differences:
        raise DataError(
            "data-ranks-differ",
            "the ranks prepare loaders that differ.",
            why=differences,
            fix="make the same dataset and loader on every rank, with a generator that is seeded the same",
        )
    tell_if_they_differ(type(dataset).__name__, [facts_of_rank["beginning"] for facts_of_rank in facts_by_rank])


def _feed(
    loader: DataLoader[Any],
    plan: DataPlan,
    source: Source | None,
    dispatch: bool,
    collectives: Collectives | None,
    shared: Collectives | None,
) -> Feed:
    """Returns the source of this rank's batches."""
    # With `dispatch`, rank 0 reads for all ranks, and the readers of the others only count.
    reads_all = dispatch and plan.index == 0
    if source is not None:
        reader: MapFeed | StreamFeed = MapFeed(loader, plan, source, everyone=reads_all)
    else:
        assert plan.width == 1 or collectives is not None, "an iterable dataset needs collectives at a width above one"
        from paceline.data.stream import StreamFeed  # streams and dispatch are loaded where a loader has them

        reader = StreamFeed(loader, plan, collectives, everyone=reads_all, all_ranks=shared)
    if not dispatch:
        return reader
    assert collectives is not None, "dispatch needs collectives"
    from paceline.data.dispatch import DispatchFeed

    return DispatchFeed(reader, plan, collectives)
