"""Batches of an iterable dataset, on one rank or many: since nobody knows how much is left, the ranks agree at each step.

each rank      [rows of its batch, does another follow] --sum over ranks--> rows of all ranks, how many have more
rank at end    takes part with a copy of an earlier batch of its own, of weight zero, until no rank has more
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.data.feed import NOTHING, Group, Mark, Steps, resized, rewired
from paceline.data.order import mix
from paceline.data.share import Counted, Share
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.world.collectives import Collectives
from paceline.world.tree import map_tensors

Part = tuple[int, Mapping[str, Any], Any]  # rows, note, batch


class StreamFeed:
    """Batches of an iterable dataset.

    Args:
        loader: the user's; its dataset, workers and collation are used.
        plan: sizes, width, index and what becomes of a step that some rank cannot fill.
        collectives: of the ranks that read different samples; not used at a width of one, nor where one reads for all.
        everyone: the batches of all ranks come in turn, for the rank that reads for all.

    Ranks:
        All of `collectives`, at each step.
    """

    def __init__(
        self, loader: DataLoader[Any], plan: DataPlan, collectives: Collectives | None, everyone: bool = False
    ) -> None:
        self.plan, self.group = plan, 0
        self._each = plan.width if everyone else 1  # batches that are read here for one step
        self._collectives = collectives
        self._loader, self._dataset = loader, loader.dataset
        self._batched = loader.batch_sampler is not None
        self._workers = max(1, loader.num_workers)
        self._generator = torch.Generator()
        self._build()

    def _build(self) -> None:
        """The inner DataLoader, over this rank's share of the stream."""
        loader, plan = self._loader, self.plan
        split = replace(plan, width=1, index=0, global_batch=plan.micro_batch) if self._each > 1 else plan
        dataset, own = _cut(loader.dataset, split)
        asks = own or split.width == 1 or _shards(loader.dataset) is None
        self.share = Share(dataset, split, own, asks, shared=loader.persistent_workers)
        place: dict[str, Any] = {"drop_last": plan.tail == "drop"}
        if self._batched:
            place["batch_sampler"] = BatchSampler(loader.sampler, self.share.per_batch, place["drop_last"])
        self._inner = rewired(
            loader,
            dataset=self.share,
            collate_fn=Counted(loader.collate_fn, self.share, self._batched),
            generator=self._generator,
            _IterableDataset_len_called=None,
            **place,
        )

    def replan(self, global_batch: int, group: int) -> bool:
        """Each rank reads its run of the larger or smaller global batches; not where items come as they are.

        Raises:
            DataError: `data-reshard`, where a rank would have nothing to read.
        """
        if not self._batched:
            return False
        if global_batch < self.plan.width:
            raise indivisible(global_batch, self.plan.width, "each rank reads a part of each")
        self.plan = resized(self.plan, global_batch)
        self._build()
        return True

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Reads on from `start`: from the dataset's own state where it has one, else over what came before."""
        plan, width = self.plan, self.plan.width
        parts = self.parts(start, note)
        full = plan.info(plan.global_batch, last=False)
        consumed, done = start.samples, int(note.get("batches", 0))
        spare: Part | None = None
        ahead = next(parts, None)
        latest, step = NOTHING, 0
        while True:
            here, ahead = ahead, next(parts, None) if ahead is not None else None
            rows, more = self._agree(here, ahead)
            if not any(rows):
                return
            if width > 1 and spare is None:
                spare = self._spare(here, rows)
            count, batch = (here[0], here[2]) if here else (spare[0], map_tensors(torch.clone, spare[2]))
            latest = here[1] if here else latest
            if rows == full.real and more:
                info = full
            else:
                info = self._info(rows, count, last=not more)
            consumed += sum(rows) if self._batched else sum(map(bool, rows))
            to_resume = {**latest, "batches": done + step + 1, "width": width, "workers": self._workers}
            yield batch, Mark(start.epoch, info, consumed, step, None, to_resume)
            if not more:
                return
            step += 1

    def parts(self, start: Position, note: Mapping[str, Any]) -> Iterator[Part]:
        """This rank's batches with their rows and notes, without a word to the other ranks."""
        share = self.share
        state = None if share.own else note.get("dataset")
        if start.samples and state is None:
            warn_once(
                "data",
                "resuming an iterable dataset by reading over the samples that were used: "
                "give the dataset `state_dict` and `load_state_dict` to resume at once.",
            )
        share.now.copy_(torch.tensor([start.epoch, start.samples]))
        share.state = state
        if state is not None:
            self._inner._iterator = None  # workers that live on would not see the state
        self._generator.manual_seed(mix(self.plan.seed, start.epoch, self.plan.index, start.samples))
        parts = iter(self._inner)
        first = next(parts, None)
        splits = "splits_itself" in note or (first is not None and "splits_itself" in first[1])
        if start.samples and splits:
            first = self._reread(first, parts, note)
        if first is not None:
            yield tuple(first)
            yield from parts

    def schedule(self, start: Position) -> None:
        """Nothing is known of what follows."""

    def groups(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Iterator[Group]:
        """The batches of all ranks, step by step (where this feed reads for everyone)."""
        width, drop, done = self.plan.width, self.plan.tail == "drop", int(note.get("batches", 0))
        parts = self.parts(start, note)
        consumed, ahead = start.samples, list(islice(parts, width))
        while ahead and not (drop and len(ahead) < width):
            here, ahead, done = ahead, list(islice(parts, width)), done + 1
            last = not ahead or (drop and len(ahead) < width)
            rows = tuple(count for count, _, _ in here) + (0,) * (width - len(here))
            consumed += sum(rows) if self._batched else len(here)
            latest = {**here[-1][1], "batches": done, "width": width, "workers": self._workers}
            here += here[:1] * (width - len(here))  # ranks without a batch repeat the first, with weight zero
            loaded = tuple(count for count, _, _ in here)
            weights = self._info(rows, 0, last).weights
            yield Group([batch for _, _, batch in here], loaded, rows, weights, last, consumed, latest)

    def _reread(self, first: Part | None, parts: Iterator[Part], note: Mapping[str, Any]) -> Part | None:
        """The first batch after those that this rank had before; its own samples cannot be told from a global count.

        Raises:
            DataError: `data-reshard`.
        """
        before, now = (note.get("width"), note.get("workers")), (self.plan.width, self._workers)
        if before != now:
            raise DataError(
                "data-reshard",
                "the rest of this epoch cannot be divided over other ranks or workers than its beginning was.",
                why=f"{type(self._dataset).__name__} splits itself, and gave its samples to {before[0]} ranks x {before[1]} "
                f"workers; now there are {now[0]} x {now[1]}: some would come twice, others not at all",
                fix="go on with as many ranks and workers; or let the dataset give its whole stream to all, which Paceline "
                "then divides and resumes at any width",
            )
        done = int(note.get("batches", 0)) * self._each
        return next(islice(parts, done - 1, None), None) if done else first

    def _agree(self, here: Part | None, ahead: Part | None) -> tuple[tuple[int, ...], bool]:
        """Rows of every rank at this step (all zero: there is none), and whether a step follows."""
        width = self.plan.width
        if width == 1:
            return (here[0] if here else 0,), ahead is not None
        mine = [0] * (width + 2)
        mine[self.plan.index] = here[0] if here else 0
        mine[width] = ahead is not None
        mine[width + 1] = here is not None and "splits_itself" in here[1]
        *rows, more, split = self._collectives.sum_ints(mine)
        if self.plan.tail == "drop" and not split:
            # One stream for all: a step that some rank cannot fill is the tail.
            return tuple(rows) if all(rows) else (0,) * width, more == width
        return tuple(rows), more > 0

    def _spare(self, here: Part | None, rows: tuple[int, ...]) -> Part:
        """A batch to take part with, once this rank has no more: a copy, because scripts change their batches."""
        spare = None if here is None else (here[0], NOTHING, map_tensors(torch.clone, here[2]))
        if all(rows):
            return spare
        source = next(index for index, count in enumerate(rows) if count)
        sent = self._collectives.broadcast_object(spare, src=source)
        return spare or sent

    def _info(self, rows: tuple[int, ...], count: int, last: bool) -> BatchInfo:
        weights = rows
        if self.plan.tail == "pad":
            weights = tuple(
                held or full for held, full in zip(rows, self.plan.rows(self.plan.global_batch), strict=True)
            )
        return BatchInfo(self.plan.index, rows, weights, count, last)

    def reseed(self, seed: int) -> None:
        """Seeds a dataset's own generator, and the workers, otherwise from now on."""
        self.plan = replace(self.plan, seed=seed)
        self.share.seed = seed

    def steps(self, epoch: int) -> int:
        """By the dataset's own length; TypeError where it has none."""
        return self.plan.steps(len(self._dataset))

    def samples(self, epoch: int) -> int | None:
        """The dataset's own length, where it has one."""
        return len(self._dataset) if hasattr(self._dataset, "__len__") else None

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """Counts full batches: a stream is not read to look."""
        note = {"batches": steps, "width": self.plan.width, "workers": self._workers}
        return Position(epoch, steps * self.plan.global_batch), note


def indivisible(global_batch: int, width: int, why: str) -> DataError:
    """The error about global batches of a stream that cannot stay what they are."""
    return DataError(
        "data-reshard",
        f"global batches of {global_batch} samples of a stream cannot be divided over {width} ranks.",
        why=f"the position was saved in a run with batches of {global_batch}; {why}",
        fix=f"go on at a width that divides {global_batch}, or change the loader's batch_size, which then counts",
    )


def _shards(dataset: Any) -> int | None:
    """How many parts a dataset can be cut into by its own `shard`; None where it has none."""
    if not callable(getattr(dataset, "shard", None)):
        return None
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return count if isinstance(count, int) else None


def _cut(dataset: Any, plan: DataPlan) -> tuple[Any, bool]:
    """The dataset, or this rank's part of it where its own `shard` can cut one for each rank."""
    shards = _shards(dataset)
    if plan.width > 1 and shards is not None and shards >= plan.width:
        return dataset.shard(num_shards=plan.width, index=plan.index), True
    return dataset, False
