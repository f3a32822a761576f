"""A feed of an iterable dataset. It is not known how many batches are left, so the ranks communicate at each step.

each rank      [rows of its batch, whether another follows] --sum over ranks--> rows of all ranks, how many have more
rank at end    takes a batch of another rank with weight zero, until no rank has more; with padding its own first one
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.data.feed import NOTHING, GlobalBatch, Mark, SeededWorkers, Steps, resized, rewired
from paceline.data.order import mix
from paceline.data.share import Counted, Share
from paceline.data.streams import captured
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.torch_internals.loaders import end_workers, has_iterator
from paceline.world.collectives import Collectives
from paceline.world.tree import map_tensors

Part = tuple[int, Mapping[str, Any], Any]  # rows, note, batch


class StreamFeed(SeededWorkers):
    """Batches of an iterable dataset.

    Args:
        loader: the user's loader. Its dataset, workers and collation are used.
        plan: sizes, width, index, and how a step is treated that some rank cannot fill.
        collectives: of the ranks that read different samples; not used for one rank, or if one rank reads for all.
        everyone: whether the batches of all ranks are read in turn, on the rank that reads for all.
        all_ranks: of all ranks whose workers must draw alike; None for one process.

    Ranks: all of `collectives`, at each step.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        plan: DataPlan,
        collectives: Collectives | None,
        everyone: bool = False,
        all_ranks: Collectives | None = None,
    ) -> None:
        self.plan = plan
        self.group = 0
        self._batches_per_step = plan.width if everyone else 1  # how many batches this rank reads at a step
        self._collectives = collectives
        self._loader = loader
        self._dataset = loader.dataset
        self._batched = loader.batch_sampler is not None
        self._workers = max(1, loader.num_workers)
        self._generator = torch.Generator()
        self._all_ranks = all_ranks
        self._is_compared = False
        self._build()

    def _build(self) -> None:
        """Builds the inner DataLoader over this rank's share of the stream."""
        loader = self._loader
        plan = self.plan
        split = plan
        if self._batches_per_step > 1:
            # This rank reads the whole stream, one rank's batch after the other.
            split = replace(plan, width=1, index=0, global_batch=plan.micro_batch)
        dataset, own = _cut(loader.dataset, split)
        # A dataset whose `shard` has too few parts for the ranks would also split itself unevenly, or not at all. So it is
        # read whole by all ranks.
        asks = own or split.width == 1 or _shards(loader.dataset) is None
        self.share = Share(dataset, split, own, asks, shared=loader.persistent_workers)
        self._order: dict[str, Any] | None = None
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
        """Changes the global batch, see `Feed`; without automatic batching it cannot.

        Raises:
            DataError: `data-reshard`, if a rank would have nothing to read.
        """
        if not self._batched:
            return False
        if global_batch < self.plan.width:
            raise indivisible(global_batch, self.plan.width, "each rank reads a part of each")
        self.plan = resized(self.plan, global_batch)
        self._build()
        return True

    def open(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Steps:
        """Continues at `start`, from the dataset's own state if it has one; else earlier samples are read and dropped."""
        parts = self.parts(start, note)
        # One process need not agree with others whether a batch follows. It looks when somebody asks, as torch would not read
        # ahead. But a dataset with a state of its own may begin anew at its end, so that its state must be known before.
        if self.plan.width == 1 and self.plan.drawn and not self.share.stateful:
            return self._alone(start, note, parts)
        return self._together(start, note, parts)

    def _alone(self, start: Position, note: Mapping[str, Any], parts: Iterator[Part]) -> Steps:
        ahead: list[Part] = []
        newest = 0

        def ends(step: int) -> bool:
            if step < newest:  # a script may keep earlier batches
                return False
            if not ahead:
                ahead.extend(islice(parts, 1))
            return not ahead

        consumed = start.samples
        batches_before = int(note.get("batches", 0))
        for step in count():
            here = ahead.pop() if ahead else next(parts, None)
            if here is None:
                return
            newest = step
            num_rows, latest_note, batch = here
            info = BatchInfo(0, (num_rows,), (num_rows,), num_rows, partial(ends, step))
            consumed += num_rows if self._batched else 1
            to_resume = {**latest_note, **self._note(batches_before + step + 1, ended=False)}
            yield batch, Mark(start.epoch, info, consumed, step, None, to_resume)

    def _together(self, start: Position, note: Mapping[str, Any], parts: Iterator[Part]) -> Steps:
        plan = self.plan
        width = plan.width
        full = plan.info(plan.global_batch, last=False)
        consumed = start.samples
        batches_before = int(note.get("batches", 0))
        filler: Part | None = None
        ahead = next(parts, None)
        self._compare_beginnings()
        latest_note = NOTHING
        for step in count():
            # One batch is read ahead, since a rank must announce at each step whether another one follows.
            here = ahead
            ahead = None
            if here is not None:
                ahead = next(parts, None)
            rows, more = self._agree(here, ahead)
            if not any(rows):
                return
            if width > 1:
                filler = self._filler(here, rows, filler)
            if here is not None:
                num_rows, latest_note, batch = here
            else:
                assert filler is not None, "a rank at its end has got a batch to take part with"
                num_rows, _, filler_batch = filler
                batch = map_tensors(torch.clone, filler_batch)
            info = full
            if rows != full.real or not more:
                info = self._info(rows, num_rows, last=not more)
            # Without automatic batching each rank reads one sample of the stream, whatever number of rows it counts as.
            consumed += sum(rows) if self._batched else sum(map(bool, rows))
            to_resume = {**latest_note, **self._note(batches_before + step + 1, ended=not more)}
            yield batch, Mark(start.epoch, info, consumed, step, None, to_resume)
            if not more:
                return

    def _compare_beginnings(self) -> None:
        """Warns if ranks read other streams, once: each would leave out what it takes for the samples of the others."""
        first = self.share.take_first()
        if self._is_compared or self._collectives is None or self.plan.width == 1:
            return
        from paceline.data.beginnings import beginning_of, tell_if_they_differ

        self._is_compared = True
        beginnings = self._collectives.gather_object(beginning_of(first))
        tell_if_they_differ(type(self._dataset).__name__, beginnings)

    def _note(self, batches: int, ended: bool) -> dict[str, Any]:
        """Returns the entries for a resume after this many batches, besides the dataset's own state.

        Args:
            batches: batches of this rank since the beginning of the epoch.
            ended: whether this is the last step of the epoch.
        """
        note: dict[str, Any] = {
            "batches": batches,
            "width": self.plan.width,
            "workers": self._workers,
            "ended": int(ended),
        }
        if self._order is not None:
            note["order"] = self._order
        return note

    def parts(self, start: Position, note: Mapping[str, Any]) -> Iterator[Part]:
        """Returns this rank's batches with their rows and notes, which are read without communication."""
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
        share.epoch_has_ended = bool(note.get("ended"))
        if state is not None:
            end_workers(self._inner)  # persistent workers would not get the state
        self._order = None
        if self.plan.drawn:
            self._order = self._drawn(note.get("order"))
        else:
            self._generator.manual_seed(mix(self.plan.seed, start.epoch, self.plan.index, start.samples))
        return self._rest(start, note, iter(self._inner))

    def _drawn(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Draws the seed of the workers as torch does, and returns what a resume needs to read the same stream again.

        Args:
            before: what this method returned where the same epoch was begun before.
        """
        source = self._loader.generator or torch.default_generator
        own = getattr(self._dataset, "generator", None)
        self.share.replayed = None
        if before is not None:
            self._generator.set_state(before["seed"])
            if isinstance(own, torch.Generator) and before["dataset"] is not None:
                own.set_state(before["dataset"])
            self.share.replayed = before["streams"]
            return before
        seed = source.get_state()
        if not self._keeps_seed and not has_iterator(self._inner):
            torch.empty((), dtype=torch.int64).random_(generator=source)  # the number that the inner loader draws below
        self._keeps_seed = False
        if self._all_ranks is not None:
            # The workers of all ranks read the same stream, and must shuffle it alike.
            seed = self._all_ranks.broadcast_object(seed)
        self._generator.set_state(seed)
        # Without workers the dataset draws from the process's own streams.
        streams = captured() if self._loader.num_workers == 0 else None
        return {
            "seed": seed,
            "dataset": own.get_state() if isinstance(own, torch.Generator) else None,
            "streams": streams,
        }

    def _rest(self, start: Position, note: Mapping[str, Any], parts: Iterator[Part]) -> Iterator[Part]:
        first = next(parts, None)
        splits = "splits_itself" in note or (first is not None and "splits_itself" in first[1])
        if start.samples and splits:
            first = self._reread(first, parts, note)
        if first is not None:
            yield tuple(first)
            yield from parts

    def schedule(self, start: Position, note: Mapping[str, Any] = NOTHING) -> None:
        """Returns None: nothing is known of the rest of a stream.

        A rank that does not read draws from its own stream the seed of the workers, as rank 0 does.
        """
        self._draws_for_rank_0(note)

    def global_batches(self, start: Position, note: Mapping[str, Any] = NOTHING) -> Iterator[GlobalBatch]:
        """Yields the batches of all ranks, step by step, if this feed reads for all ranks."""
        width = self.plan.width
        parts = self.parts(start, note)
        consumed = start.samples
        batches = int(note.get("batches", 0))
        # One step is read ahead, so that it is known which step is the last.
        ahead = self._parts_of_step(parts)
        while ahead:
            here = ahead
            ahead = self._parts_of_step(parts)
            last = not ahead
            batches += 1
            num_missing = width - len(here)
            rows_read = [num_rows for num_rows, _, _ in here]
            rows = (*rows_read, *([0] * num_missing))
            consumed += sum(rows) if self._batched else len(here)
            latest_note = here[-1][1]
            here += here[:1] * num_missing  # ranks without a batch repeat the first, with weight zero
            loaded = tuple(num_rows for num_rows, _, _ in here)
            weights = self._info(rows, 0, last).weights
            to_resume = {**latest_note, **self._note(batches, ended=last)}
            batches_of_step = [batch for _, _, batch in here]
            yield GlobalBatch(batches_of_step, loaded, rows, weights, last, consumed, to_resume)

    def _parts_of_step(self, parts: Iterator[Part]) -> list[Part]:
        """Reads a batch for each rank; at the end of the stream fewer, or none if such a tail is dropped."""
        step = list(islice(parts, self.plan.width))
        if self.plan.tail == "drop" and len(step) < self.plan.width:
            return []
        return step

    def _reread(self, first: Part | None, parts: Iterator[Part], note: Mapping[str, Any]) -> Part | None:
        """Skips the batches that this rank has read before, and returns the next one.

        A dataset that splits itself gives no global count of samples, so each rank must count its own batches.

        Raises:
            DataError: `data-reshard`, if the number of ranks or workers has changed.
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
        if not num_read:
            return first
        # The first batch has been read already.
        return next(islice(parts, num_read - 1, None), None)

    def _agree(self, here: Part | None, ahead: Part | None) -> tuple[tuple[int, ...], bool]:
        """Returns the rows of every rank at this step (all zero if there is none), and whether a step follows. Ranks: all."""
        width = self.plan.width
        num_rows = 0 if here is None else here[0]
        if width == 1:
            return (num_rows,), ahead is not None
        assert self._collectives is not None, "needed at a width above one"
        # Each rank writes its rows at its own place, so that the sum over ranks is the list of all of them.
        own_rows = [0] * width
        own_rows[self.plan.index] = num_rows
        has_more = ahead is not None
        *rows, num_more = self._collectives.sum_ints([*own_rows, has_more])
        if self.plan.tail == "drop":
            # A step that some rank cannot fill is no whole global batch.
            all_have_more = num_more == width
            if not all(rows):
                return (0,) * width, all_have_more
            if here is not None and "splits_itself" in here[1] and 0 < num_more < width:
                self._tell_of_uneven_parts(num_more)
            return tuple(rows), all_have_more
        return tuple(rows), num_more > 0

    def _tell_of_uneven_parts(self, num_more: int) -> None:
        """Says once that ranks have whole batches which are left out."""
        warn_once(
            "data",
            f"{type(self._dataset).__name__} splits itself, and gave {num_more} of {self.plan.width} processes more batches "
            "than the others. With drop_last=True an epoch ends where some process has no whole batch left. With "
            "drop_last=False every sample is used.",
        )

    def _filler(self, here: Part | None, rows: tuple[int, ...], earlier: Part | None) -> Part | None:
        """Returns the batch with which this rank takes part in a step in which it has no samples. Ranks: all.

        Without padding it counts for nothing, and is of the same step on another rank: a parameter that no sample of the step
        uses, such as one of an expert, must get no gradient from it either.

        Args:
            here: this rank's batch of the step.
            rows: of all ranks; the same on all of them, so that all communicate or none does.
            earlier: what this method returned at the step before.
        """
        is_padded = self.plan.tail == "pad"
        if is_padded and earlier is not None:
            return earlier
        if all(rows) and not is_padded:
            return None
        filler: Part | None = None
        if here is not None:
            num_rows, _, batch = here
            filler = (num_rows, NOTHING, map_tensors(torch.clone, batch))  # scripts may change their batches
        if all(rows):
            return filler
        assert self._collectives is not None, "needed at a width above one"
        source = next(index for index, num_rows in enumerate(rows) if num_rows)
        first_ranks: Part = self._collectives.broadcast_object(filler, src=source)
        return filler or first_ranks

    def _info(self, rows: tuple[int, ...], loaded: int, last: bool) -> BatchInfo:
        weights = rows
        if self.plan.tail == "pad":
            # With padding, a rank that has no batch left has the weight of a full batch.
            full_rows = self.plan.rows(self.plan.global_batch)
            padded = [num_rows or full for num_rows, full in zip(rows, full_rows, strict=True)]
            weights = tuple(padded)
        return BatchInfo(self.plan.index, rows, weights, loaded, last)

    def reseed(self, seed: int, drawn: bool = False) -> None:
        """Changes the seed of the dataset's own generator and of the workers, or whether seeds are drawn."""
        self.plan = replace(self.plan, seed=seed, drawn=drawn)
        self.share.seed = seed
        self.share.drawn = drawn

    def _own_generators(self) -> list[torch.Generator]:
        """Returns the generators of the loader and of its dataset."""
        holders = (self._loader, self._dataset)
        generators = [getattr(holder, "generator", None) for holder in holders]
        return [generator for generator in generators if isinstance(generator, torch.Generator)]

    def steps(self, epoch: int) -> int:
        return self.plan.steps(len(cast(Sized, self._dataset)))

    def samples(self, epoch: int) -> int | None:
        try:
            return len(cast(Sized, self._dataset))
        except (TypeError, NotImplementedError):  # as of a ChainDataset, whose parts have no length
            return None

    def after(self, epoch: int, steps: int) -> tuple[Position, Mapping[str, Any]]:
        # The stream is not read for this, so all batches are assumed to be full.
        return Position(epoch, steps * self.plan.global_batch), self._note(steps, ended=False)


def indivisible(global_batch: int, width: int, why: str) -> DataError:
    """Returns the error for a global batch of a stream that cannot keep its size."""
    return DataError(
        "data-reshard",
        f"global batches of {global_batch} samples of a stream cannot be divided over {width} ranks.",
        why=f"the position was saved in a run with batches of {global_batch}; {why}",
        fix=f"resume with a number of ranks that divides {global_batch}, or change the loader's batch_size, which then counts",
    )


def _shards(dataset: object) -> int | None:
    """Returns the number of parts into which a dataset can be divided by its own `shard`; None if it has no such method."""
    if not callable(getattr(dataset, "shard", None)):
        return None
    count = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return count if isinstance(count, int) else None


def _cut(dataset: Any, plan: DataPlan) -> tuple[Any, bool]:
    """Returns this rank's part of the dataset if its own `shard` can make one for each rank, else the whole dataset."""
    shards = _shards(dataset)
    if plan.width > 1 and shards is not None and shards >= plan.width:
        return dataset.shard(num_shards=plan.width, index=plan.index), True
    return dataset, False
