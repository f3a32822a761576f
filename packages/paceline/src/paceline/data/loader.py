"""`PreparedLoader`: iterates over this rank's part of each global batch."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.data.cursor import Cursor
from paceline.data.divided_batches import divided_sampler
from paceline.data.feed import NOTHING, Feed, Mark, Steps
from paceline.data.prefetch import on_device
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.world.tree import common_rows

T = TypeVar("T")


class CreatedIterator:
    """Stands for an iterator of a loader for as long as that exists."""


class LoopObserver(Protocol):
    """What a loader tells of its loops; `active.ActiveLoaders` listens, and explains each method."""

    @property
    def trained(self) -> bool: ...

    @property
    def takes_ahead(self) -> bool: ...

    def loaded(self, loader: PreparedLoader, takes_ahead: bool, is_source: bool) -> None: ...

    def is_source_of_several(self, loader: PreparedLoader) -> bool: ...

    def created(self) -> CreatedIterator: ...

    def push(self, loader: PreparedLoader, iterator: CreatedIterator) -> None: ...

    def observed(self, batches: Iterator[T]) -> Iterator[T]: ...

    def give(self, given: GivenBatch, batch: object) -> None: ...

    def first_unused(self, loader: PreparedLoader) -> GivenBatch | None: ...

    def ask(self, loader: PreparedLoader) -> None: ...

    def end(self, loader: PreparedLoader) -> None: ...

    def ended_beside(self, loader: PreparedLoader) -> bool: ...

    def remove(self, loader: PreparedLoader, finished: bool) -> None: ...


@dataclass(frozen=True, eq=False)
class GivenBatch:
    """A batch that a loader has yielded. A script may compute its loss after it has taken later ones.

    Attributes:
        loader: the loader.
        mark: the place of the batch in its epoch.
        before: that of the batch before it, in the same loop; None for the first one.
        seen_rows: the number of rows that lie in this rank's batch, filler included. Where `collate_fn` is the script's own, it
            is the length along dim 0 that all tensors of the batch share; of packed documents, the number of tokens. None
            where that cannot be seen: the lengths differ, or the batch has no tensor.
        may_drop: whether it may have other rows than its indices say, because `collate_fn` is the script's own.
    """

    loader: weakref.ref[PreparedLoader]
    mark: Mark
    before: Mark | None
    seen_rows: int | None
    may_drop: bool

    @property
    def info(self) -> BatchInfo:
        """The counts of the batch."""
        return self.mark.info

    def place(self) -> tuple[int, int]:
        """Its epoch, and the number of samples of the epoch up to and including it, over all ranks."""
        return self.mark.epoch, self.mark.consumed

    def window_rows(self, count: int) -> int | None:
        """Returns the number of samples in this batch and the `count` - 1 after it, over all ranks, in its epoch.

        None for an iterable dataset, of which the batches after it are not known.
        """
        if self.mark.schedule is not None:
            return self.mark.schedule.weight(self.mark.step, count)
        if count == 1 or self.info.last:
            return sum(self.info.weights)
        return None


class EpochRows(NamedTuple):
    """The number of rows that one rank has yielded in a finished epoch: with filler, and without (filler comes last)."""

    loaded: int
    real: int


class PreparedLoader:
    """This rank's batches, on its device; `prepare_loader` constructs it.

    Each `for` over it is one epoch. After a `break` the next `for` begins another epoch. A `state_dict` that was taken in the
    loop, or after such a `break`, still describes the interrupted epoch, and after `load_state_dict` the next `for` yields
    the rest of that epoch. Other attributes are those of the original DataLoader (`dataset`, `batch_size`, `collate_fn`, ...).

    Attributes:
        original: the DataLoader that was prepared.
        device: the device of the batches.
        epoch_rows: the rows of the last finished epoch; None before one has ended.
        trains: whether a backward pass has run inside of a loop over it.
        may_drop: whether a batch may have other rows than its indices say, because `collate_fn` is the script's own.
        arguments: the arguments of `prepare_loader`.
        asked: the settings of the script that decide the global batch, except for the number of ranks.

    Ranks: all must iterate in step. On several ranks, iterable datasets and `dispatch` communicate at each batch. Of the other
    loaders, those whose order is drawn communicate once or twice an epoch, and sequential ones never.
    """

    def __init__(
        self,
        original: DataLoader[Any],
        feed: Feed,
        device: torch.device,
        active: LoopObserver,
        non_blocking: bool,
        arguments: Mapping[str, Any],
        asked: Mapping[str, Any],
    ) -> None:
        self.original = original
        self.device = device
        self.epoch_rows: EpochRows | None = None
        self.trains = False
        self.may_drop = original.collate_fn not in (default_collate, default_convert)
        self._given: GivenBatch | None = None
        self._divided_by = divided_sampler(original)
        self._feed = feed
        self._active = active
        self._non_blocking = non_blocking
        self._cursor = Cursor()
        self._began = self._cursor.next_iteration()  # where the last iteration began
        self._open = 0  # the number of running iterations
        self.arguments = arguments
        self.asked = asked

    # -- the loop --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        # Opened now and not at the first `next`: torch draws the seed of an epoch when the iterator is created, so that for
        # `zip(first, second)` both seeds are drawn before the first batch.
        start, note = self._begin()
        self._move(chosen=None)
        steps = self._feed.open(start, note)
        iterator = self._active.created()
        if self._cursor.is_loaded:
            # The rest of an epoch that was loaded from a checkpoint comes once, also if nobody asks this iterator for a batch:
            # `zip` does not ask its second loader if the first one is at its end.
            self._move(is_loaded=False, rest=weakref.ref(iterator))
            steps = self._rest_of_epoch(start, steps)
        return self._batches(iterator, start, note, steps)

    def _rest_of_epoch(self, start: Position, steps: Steps) -> Steps:
        """Returns the same steps. If there are none, the position is the next epoch from now on."""
        first = next(steps, None)
        if first is None:
            self._cursor = Cursor(Position(start.epoch + 1))
        return _chained([] if first is None else [first], steps)

    def _batches(
        self, iterator: CreatedIterator, start: Position, note: Mapping[str, Any], opened: Steps
    ) -> Iterator[Any]:
        self._move(rest=None)
        mark_before = self._cursor.mark
        given_before = self._given if self._open else None
        previous: Mark | None = None
        loaded = 0
        real = 0
        self._began = (start, note)
        # The feed reads on the CPU; its batches are copied to the device, shown to the runtime (which may record them), and
        # the wait for them is measured.
        on_their_way = on_device(opened, self.device, self._non_blocking)
        steps = self._active.observed(on_their_way)
        self._active.push(self, iterator)
        self._open += 1
        finished = False
        try:
            for batch, mark in steps:
                # The mark is set before the script sees the batch, so that `state_dict` in the loop counts it as used.
                self._move(mark=mark)
                loaded += mark.info.loaded
                real += mark.info.real[mark.info.index]
                seen_rows = self._rows_in(batch) if self.may_drop else mark.info.loaded
                self._given = GivenBatch(weakref.ref(self), mark, previous, seen_rows, self.may_drop)
                previous = mark
                self._active.give(self._given, batch)
                yield batch
                self._active.ask(self)
            self._active.end(self)
            finished = True
        finally:
            # After a `break` or an error the mark stays: `state_dict` then still describes the interrupted epoch.
            self._open -= 1
            if finished or self._active.ended_beside(self):
                self._move(mark=None, start=Position(start.epoch + 1), note=NOTHING)
            if finished:
                self.epoch_rows = EpochRows(loaded, real)
            if self._open:
                # This loop was inside of another one over the same loader, which continues.
                self._move(mark=mark_before)
                self._given = given_before
            self._active.remove(self, finished)
            steps.close()  # type: ignore[attr-defined]

    def _rows_in(self, batch: object) -> int | None:
        """Returns the number of rows over which a loss is the mean, as far as a batch shows it."""
        if self._divided_by is not None:
            rows = self._divided_by.rows_in(batch)
            if rows is not None:
                return rows
        return common_rows(batch)

    def train(self) -> None:
        """Marks the loader as one that trains: a backward pass has run inside of a loop over it."""
        self.trains = True

    def start_after(self, count: int) -> None:
        """Makes the next `for` begin after the first `count` batches of its epoch."""
        start, note = self._begin()
        position, skipped = self._feed.after(start.epoch, count)
        # The order of an epoch that was begun stays what it is.
        kept = {name: note[name] for name in ("order",) if name in note}
        self._cursor = Cursor(position, {**skipped, **kept})

    def _begin(self) -> tuple[Position, Mapping[str, Any]]:
        """Returns where the next iteration begins, and the note for it."""
        return self._cursor.next_iteration()

    def _move(self, **changes: Any) -> None:
        self._cursor = replace(self._cursor, **changes)

    def __len__(self) -> int:
        """Returns the number of this rank's batches in a whole epoch. Raises TypeError if the dataset has no length."""
        return self._feed.steps(self.position.epoch)

    @property
    def current(self) -> BatchInfo | None:
        """The counts of the current batch; None outside of a loop."""
        if not self._open or self._cursor.mark is None:
            return None
        return self._cursor.mark.info

    @property
    def given(self) -> GivenBatch | None:
        """The current batch; None outside of a loop."""
        return self._given if self.current is not None else None

    @property
    def newest(self) -> GivenBatch | None:
        """The batch that was given last, also after its loop."""
        return self._given

    # -- the position ----------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The epoch, and the number of its samples that were yielded over all ranks, without those that are read ahead."""
        return self._cursor.position

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next epoch. If the rest of this epoch was just loaded from a checkpoint, it still comes next."""
        if self._open:
            self._move(chosen=Position(epoch))
        elif self._cursor.mark is not None or self._cursor.start.epoch != epoch:
            self._cursor = Cursor(Position(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Returns position, seed, and the sizes of batches and dataset. The same on all ranks, for any number of them.

        Batches count that the script has taken; if it takes batches ahead, those from which it has computed a loss.
        If an iterable dataset has a state of its own, it includes that of rank 0's copy of the stream. A loader that only
        evaluates, beside one that trains, does not continue an interrupted epoch: its loop is not entered again.
        """
        cursor = self._cursor
        unused = self._active.first_unused(self)
        if unused is not None and cursor.mark is not None and unused.mark.epoch == cursor.mark.epoch:
            cursor = self._cursor_before(unused)
        elif unused is not None:
            warn_once(
                "data",
                "this state does not include batches that the script has taken from the loader and has not used: the "
                "loader has come to its end, so a resumed run begins with the next epoch. Save before, or after they are used.",
            )
        note = cursor.note
        position = cursor.position
        if cursor.rest is not None and cursor.rest() is None:  # it was thrown away: its epoch is over
            position = Position(position.epoch + 1)
            note = NOTHING
        if cursor.mark is not None:
            note = self._noted(cursor.mark)
            only_evaluates = not self.trains and self._active.trained
            if only_evaluates and not self._open:
                position = Position(cursor.mark.epoch + 1)
                note = NOTHING
        if self._active.takes_ahead:
            note = {**note, "takes_ahead": True}
        if self._active.is_source_of_several(self):
            note = {**note, "is_source": True}
        return {
            **note,
            **position.state_dict(),
            **self.asked,
            "global_batch": self.plan.global_batch,
            "group": self._feed.group,
            "seed": self.plan.seed,
            "length": self._feed.samples(position.epoch),
            "trains": self.trains,
            **self._feed.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next `for` continue where `state` was taken, on any number of ranks, with the same global batch size.

        If the script has changed the batch size since then, its new size is used. Ranks: all.

        Raises:
            DataError: `data-state`, `data-reshard`.
        """
        note = dict(state)
        numbers = [note.pop(name, None) for name in ("epoch", "samples", "seed")]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise DataError(
                "data-state",
                "this is not the state of a loader.",
                why=f"epoch, samples and seed must be whole numbers; the state is {dict(state)}",
                fix="pass the result of `state_dict()` of a prepared loader",
            )
        epoch, samples, seed = numbers
        # What remains in `note` after this is for the feed.
        length = note.pop("length", None)
        self.trains = note.pop("trains", False)
        self._active.loaded(self, note.pop("takes_ahead", False), note.pop("is_source", False))
        self._resize({name: note.pop(name, None) for name in (*self.asked, "global_batch", "group")})
        # A checkpoint of an older version, or of a run with a `data_seed`, goes on in the order of that seed.
        self._feed.reseed(seed, drawn=bool(note.pop("drawn", 0)))
        self._feed.load(note.pop("streams_now", NOTHING))
        # In the middle of an epoch, another number of samples means another order, of which nobody knows what was read.
        if samples and length != self._feed.samples(epoch):
            warn_once(
                "data",
                f"the position was saved {samples} samples into an epoch of {length}, which now has "
                f"{self._feed.samples(epoch)}: the rest of it is not what it was; `set_epoch({epoch + 1})` leaves it out.",
            )
        self._cursor = Cursor(Position(epoch, samples), note, is_loaded=samples > 0 or "order" in note)

    def _noted(self, mark: Mark) -> Mapping[str, Any]:
        """Returns the note of a batch, with what is needed to read the same order again."""
        if mark.schedule is None or not self.plan.drawn or "order" in mark.note:
            return mark.note
        return {**mark.note, "order": mark.schedule.entries.note()}

    def _resize(self, saved: Mapping[str, Any]) -> None:
        """Keeps the global batch of the run that has saved the state, unless the script has changed it."""
        global_batch = saved["global_batch"]
        group = saved["group"]
        own_global_batch = self.plan.global_batch
        own_group = self._feed.group
        if global_batch is None or (global_batch, group) == (own_global_batch, own_group):
            return
        was = _sized(global_batch, group)
        now = _sized(own_global_batch, own_group)
        difference = f"a global batch is {now} now, and was {was} where the position was saved"
        changed = [f"{name} {saved[name]} to {value}" for name, value in self.asked.items() if saved[name] != value]
        if changed:
            warn_once("data", f"{difference}: the script has changed {' and '.join(changed)}.")
        elif not self._feed.replan(global_batch, group):
            warn_once(
                "data",
                f"{difference}: with batch_size=None each rank reads one item a step, so the width decides; set "
                "batch_size to keep it.",
            )
        else:
            warn_once(
                "data",
                f"a global batch stays {was}, as in the run that saved, divided over {self.plan.width} (this width alone "
                f"would take {now}); change batch_size to choose another.",
            )

    # -- going back, for a run that is saved as it was after its last step (`evaluation_stop`) ---------------------

    @property
    def under_way(self) -> bool:
        """Whether a loop over it is running."""
        return self._open > 0

    @property
    def cursor(self) -> Cursor:
        """Where it is, for `put_back`."""
        return self._cursor

    def put_back(self, cursor: Cursor) -> None:
        """Goes back, so that `state_dict` returns what it would have returned then."""
        self._cursor = cursor

    def take_back_batch(self) -> None:
        """Makes `state_dict` count the current batch as not yielded yet."""
        if self._given is not None:
            self._cursor = self._cursor_before(self._given)

    def take_back_epoch(self) -> None:
        """Makes `state_dict` count no batch of the running loop as yielded."""
        self._cursor = self._cursor_at_begin(self._cursor.mark)

    def _cursor_before(self, given: GivenBatch) -> Cursor:
        """Returns where the loader was before it yielded a batch of the running loop."""
        if given.before is not None:
            return replace(self._cursor, mark=given.before)
        return self._cursor_at_begin(given.mark)

    def _cursor_at_begin(self, mark: Mark | None) -> Cursor:
        """Returns where the running loop began, which has yielded the batch of this mark, if any."""
        start, note = self._began
        noted = NOTHING if mark is None else self._noted(mark)
        # The order was drawn already, and is not drawn again.
        order = {name: value for name, value in noted.items() if name == "order"}
        return Cursor(start, {**note, **order})

    # -- attributes ------------------------------------------------------------------------------------------------

    @property
    def feed(self) -> Feed:
        """The source of the batches."""
        return self._feed

    @property
    def plan(self) -> DataPlan:
        """How samples are divided over the ranks."""
        return self._feed.plan

    @property
    def total_batch_size(self) -> int:
        """The number of samples in a global batch."""
        return self.plan.global_batch

    @property
    def total_dataset_length(self) -> int:
        """The number of samples in the dataset."""
        return len(self.original.dataset)  # type: ignore[arg-type]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the epoch's last."""
        current = self.current
        return current is not None and current.last

    @property
    def remainder(self) -> int:
        """The number of samples in an incomplete last global batch; 0 if it is full, -1 if it is unknown or dropped."""
        if self.plan.tail == "drop":
            return -1
        length = self._feed.samples(self.position.epoch)
        return -1 if length is None else length % self.plan.global_batch

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.original, name)

    def __repr__(self) -> str:
        return f"PreparedLoader({type(self.original.dataset).__name__}, {self.plan}, {self.position})"


def _chained(read: list[tuple[Any, Mark]], steps: Steps) -> Steps:
    """Yields steps that were read already, and those after them."""
    yield from read
    yield from steps


def _sized(samples: int, group: int) -> str:
    """Describes a global batch."""
    return f"{group} of the sampler's batches" if group else f"{samples} samples"
