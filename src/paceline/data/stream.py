"""Batches of an iterable dataset, on one rank or many: since nobody knows how much is left, the ranks agree at each step.

each rank      [rows of its batch, does another follow] --sum over ranks--> rows of all ranks, how many have more
rank at end    takes part with a copy of an earlier batch of its own, of weight zero, until no rank has more
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from itertools import count, islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.data.feed import NOTHING, GlobalBatch, Mark, Steps, resized, rewired
from paceline.data.order import mix
from paceline.data.share import Counted, Share
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.torch_internals.loaders import end_workers
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
        self.plan = plan
        self.group = 0
        self._batches_per_step = plan.width if everyone else 1  # that are read here
        self._collectives = collectives
        self._loader = loader
        self._dataset = loader.dataset
        self._batched = loader.batch_sampler is not None
        self._workers = max(1, loader.num_workers)
        self._generator = torch.Generator()
        self._build()

    def _build(self) -> None:
        """The inner DataLoader, over this rank's share of the stream."""
        loader, plan = self._loader, self.plan
        split = plan
        if self._batches_per_step > 1:
            # This rank reads the whole stream, one rank's batch after the other.
            split = replace(plan, width=1, index=0, global_batch=plan.micro_batch)
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
        consumed = start.samples
        batches_before = int(note.get("batches", 0))
        spare: Part | None = None
        ahead = next(parts, None)
        latest_note = NOTHING
        for step in count():
            # One part is read ahead, since a rank must say at each step whether another follows.
            here = ahead
            ahead = next(parts, None) if here is not None else None
            rows, more = self._agree(here, ahead)
            if not any(rows):
                return
            if width > 1 and spare is None:
                spare = self._spare(here, rows)
            if here is not None:
                num_rows, latest_note, batch = here
            else:
                assert spare is not None, "a rank at its end has got a batch to take part with"
                num_rows, _, spare_batch = spare
                batch = map_tensors(torch.clone, spare_batch)
            info = full
            if rows != full.real or not more:
                info = self._info(rows, num_rows, last=not more)
            consumed += sum(rows) if self._batched else sum(map(bool, rows))
            to_resume = {**latest_note, **self._note(batches_before + step + 1)}
            yield batch, Mark(start.epoch, info, consumed, step, None, to_resume)
            if not more:
                return

    def _note(self, batches: int) -> dict[str, int]:
        """What a resume after this many batches needs besides the dataset's own state."""
        return {"batches": batches, "width": self.plan.width, "workers": self._workers}

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
            end_workers(self._inner)  # workers that live on would not see the state
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

    def global_batches(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Iterator[GlobalBatch]:
        """The batches of all ranks, step by step (where this feed reads for everyone)."""
        width = self.plan.width
        parts = self.parts(start, note)
        consumed = start.samples
        batches = int(note.get("batches", 0))
        # One step is read ahead, to know whether a step is the last.
        ahead = self._parts_of_step(parts)
        while ahead:
            here = ahead
            ahead = self._parts_of_step(parts)
            last = not ahead
            batches += 1
            num_missing = width - len(here)
            rows = tuple(num_rows for num_rows, _, _ in here) + (0,) * num_missing
            consumed += sum(rows) if self._batched else len(here)
            latest_note = here[-1][1]
            here += here[:1] * num_missing  # ranks without a batch repeat the first, with weight zero
            loaded = tuple(num_rows for num_rows, _, _ in here)
            weights = self._info(rows, 0, last).weights
            to_resume = {**latest_note, **self._note(batches)}
            yield GlobalBatch([batch for _, _, batch in here], loaded, rows, weights, last, consumed, to_resume)

    def _parts_of_step(self, parts: Iterator[Part]) -> list[Part]:
        """A batch for each rank, fewer at the end of the stream; none where such a tail is dropped."""
        step = list(islice(parts, self.plan.width))
        if self.plan.tail == "drop" and len(step) < self.plan.width:
            return []
        return step

    def _reread(self, first: Part | None, parts: Iterator[Part], note: Mapping[str, Any]) -> Part | None:
        """The first batch after those that this rank had before; its own samples cannot be told from a global count.

        Raises:
            DataError: `data-reshard`.
        """
        before = (note.get("width"), note.get("workers"))
        now = (self.plan.width, self._workers)
        if before != now:
            raise DataError(
                "data-reshard",
                "the rest of this epoch cannot be divided over other ranks or workers than its beginning was.",
                why=f"{type(self._dataset).__name__} splits itself, and gave its samples to {before[0]} ranks x {before[1]} "
                f"workers; now there are {now[0]} x {now[1]}: some would come twice, others not at all",
                fix="go on with as many ranks and workers; or let the dataset give its whole stream to all, which Paceline "
                "then divides and resumes at any width",
            )
        num_read = int(note.get("batches", 0)) * self._batches_per_step
        return next(islice(parts, num_read - 1, None), None) if num_read else first

    def _agree(self, here: Part | None, ahead: Part | None) -> tuple[tuple[int, ...], bool]:
        """Rows of every rank at this step (all zero: there is none), and whether a step follows."""
        width = self.plan.width
        if width == 1:
            return (here[0] if here else 0,), ahead is not None
        assert self._collectives is not None, "needed at a width above one"
        own_rows = [0] * width
        own_rows[self.plan.index] = here[0] if here else 0
        has_more = ahead is not None
        splits_itself = here is not None and "splits_itself" in here[1]
        *rows, num_more, num_split = self._collectives.sum_ints([*own_rows, has_more, splits_itself])
        if self.plan.tail == "drop" and not num_split:
            # One stream for all: a step that some rank cannot fill is the tail.
            return tuple(rows) if all(rows) else (0,) * width, num_more == width
        return tuple(rows), num_more > 0

    def _spare(self, here: Part | None, rows: tuple[int, ...]) -> Part:
        """A batch to take part with, once this rank has no more: a copy, because scripts change their batches."""
        spare: Part | None = None
        if here is not None:
            num_rows, _, batch = here
            spare = (num_rows, NOTHING, map_tensors(torch.clone, batch))
        if spare is not None and all(rows):
            return spare
        assert self._collectives is not None, "needed at a width above one"
        source = next(index for index, num_rows in enumerate(rows) if num_rows)
        first_ranks: Part = self._collectives.broadcast_object(spare, src=source)
        return spare or first_ranks

    def _info(self, rows: tuple[int, ...], loaded: int, last: bool) -> BatchInfo:
        weights = rows
        if self.plan.tail == "pad":
            # A rank that has nothing left counts as much as with a full batch.
            full_rows = self.plan.rows(self.plan.global_batch)
            weights = tuple(num_rows or full for num_rows, full in zip(rows, full_rows, strict=True))
        return BatchInfo(self.plan.index, rows, weights, loaded, last)

    def reseed(self, seed: int) -> None:
        """Seeds a dataset's own generator, and the workers, otherwise from now on."""
        self.plan = replace(self.plan, seed=seed)
        self.share.seed = seed

    def steps(self, epoch: int) -> int:
        """By the dataset's own length; TypeError where it has none."""
        return self.plan.steps(len(cast(Sized, self._dataset)))

    def samples(self, epoch: int) -> int | None:
        """The dataset's own length, where it has one."""
        return len(self._dataset) if hasattr(self._dataset, "__len__") else None

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        """Counts full batches: a stream is not read to look."""
        return Position(epoch, steps * self.plan.global_batch), self._note(steps)


def indivisible(global_batch: int, width: int, why: str) -> DataError:
    """The error about global batches of a stream that cannot stay what they are."""
    return DataError(
        "data-reshard",
        f"global batches of {global_batch} samples of a stream cannot be divided over {width} ranks.",
        why=f"the position was saved in a run with batches of {global_batch}; {why}",
        fix=f"resume with a number of ranks that divides {global_batch}, or change the loader's batch_size, which then counts",
    )


def _shards(dataset: object) -> int | None:
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
