"""`PreparedLoader`: the loop that a user writes, over this rank's part of each global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from paceline.base.errors import DataError
from paceline.base.log import warn_once
from paceline.data.active import ActiveLoaders
from paceline.data.feed import NOTHING, Feed, Mark
from paceline.data.prefetch import on_device
from paceline.plan.data import BatchInfo, DataPlan, Position
from paceline.world import runtime


class EpochRows(NamedTuple):
    """Rows that one rank handed out in an epoch that has ended: with filler, and without (filler comes last)."""

    loaded: int
    real: int


Place = tuple[Mark | None, Position, Mapping[str, Any]]  # the last batch's mark, and where the next epoch starts


class PreparedLoader:
    """This rank's batches, on its device; made by `prepare_loader`.

    Each `for` over it is one epoch. An epoch that `break` cut off is over for the next `for`, which begins another;
    `state_dict`, taken in the loop or after such a break, still says where the epoch stands, and after
    `load_state_dict` the next `for` gives the rest of that epoch. What is not named here is looked up in the
    DataLoader that was prepared (`dataset`, `batch_size`, `collate_fn`, ...).

    Attributes:
        original: the DataLoader that was prepared.
        device: where the batches lie.
        epoch_rows: rows of the epoch that ended last; None before one has.
        trains: whether a backward pass has run inside a loop over it.
        arguments: what it was prepared with.
        asked: the settings of the script that decide the global batch, but for the width.

    Ranks:
        All iterate in step. At a width above one, iterable datasets and `dispatch` communicate at each batch, other
        loaders never.
    """

    def __init__(
        self,
        original: DataLoader[Any],
        feed: Feed,
        device: torch.device,
        active: ActiveLoaders,
        non_blocking: bool,
        arguments: Mapping[str, Any],
        asked: Mapping[str, Any],
    ) -> None:
        self.original = original
        self.device = device
        self.epoch_rows: EpochRows | None = None
        self.trains = False
        self._feed = feed
        self._active = active
        self._non_blocking = non_blocking
        # Where the next epoch starts, unless one has been begun.
        self._position = Position()
        self._note = NOTHING
        self._mark: Mark | None = None  # of the batch handed out last, in an epoch that was begun and not finished
        self._chosen: Position | None = None  # what `set_epoch` chose while an epoch was under way
        self._previous: Mark | None = None  # of the batch before it, in the same iteration
        self._began: tuple[Position, Mapping[str, Any]] = (self._position, self._note)  # where the last iteration began
        self._open = 0  # iterations under way
        self.arguments = arguments
        self.asked = asked

    # -- the loop --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        start, note = self._begin()
        mark_before = self._mark
        previous: Mark | None = None
        loaded = 0
        real = 0
        self._began = (start, note)
        on_their_way = on_device(self._feed.open(start, note), self.device, self._non_blocking)
        steps = self._active.measured(runtime.current().batches(on_their_way))
        self._active.push(self)
        self._open += 1
        finished = False
        try:
            for batch, mark in steps:
                self._previous, self._mark = previous, mark
                previous = mark
                loaded += mark.info.loaded
                real += mark.info.real[mark.info.index]
                self._active.give(self)
                yield batch
                self._active.ask(self)
            self._active.end(self)
            finished = True
        finally:
            self._open -= 1
            if finished:
                self._mark = None
                self._position = Position(start.epoch + 1)
                self._note = NOTHING
                self.epoch_rows = EpochRows(loaded, real)
            if self._open:
                self._mark = mark_before  # this loop ran inside another one over the same loader, which goes on
            self._active.remove(self, finished)
            steps.close()  # type: ignore[attr-defined]

    def train(self) -> None:
        """A backward pass has run inside a loop over it."""
        self.trains = True

    def start_after(self, count: int) -> None:
        """Lets the next `for` begin after the first `count` batches of its epoch."""
        epoch = self._begin()[0].epoch
        self._start_at(*self._feed.after(epoch, count))

    def _begin(self) -> tuple[Position, Mapping[str, Any]]:
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            return chosen, NOTHING
        if self._mark is not None:
            return Position(self._mark.epoch + 1), NOTHING
        return self._position, self._note

    def __len__(self) -> int:
        """Batches of this rank in the whole epoch; TypeError where the dataset has no length."""
        return self._feed.steps(self.position.epoch)

    @property
    def current(self) -> BatchInfo | None:
        """Counts of the batch that was handed out last; None outside of a loop."""
        return self._mark.info if self._open and self._mark is not None else None

    def window_rows(self, count: int) -> int | None:
        """Samples that weigh in the current batch and the `count` - 1 after it, over all ranks, within this epoch.

        None outside of a loop, and for an iterable dataset, which knows no more than its current batch.
        """
        if not self._open or self._mark is None:
            return None
        mark = self._mark
        if mark.schedule is not None:
            return mark.schedule.weight(mark.step, count)
        if count == 1 or mark.info.last:
            return sum(mark.info.weights)
        return None

    # -- the position ----------------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Epoch, and global samples of it that were handed out (not those that are read ahead)."""
        return self._position if self._mark is None else Position(self._mark.epoch, self._mark.consumed)

    def set_epoch(self, epoch: int) -> None:
        """Makes `epoch` the next one; the rest of this very epoch, just loaded from a checkpoint, stays what is next."""
        if self._open:
            self._chosen = Position(epoch)
        elif self._mark is not None or self._position.epoch != epoch:
            self._start_at(Position(epoch), NOTHING)

    def state_dict(self) -> dict[str, Any]:
        """Position, seed, sizes of batches and dataset; the same on all ranks, so that one copy serves every width.

        Where an iterable dataset has a state of its own, this is in it too, as rank 0's copy of the stream has it.
        Beside a loader that trains, one that only evaluates has no rest to come back to: its loop was left for good.
        """
        note = self._note if self._mark is None else self._mark.note
        position = self.position
        if self._mark is not None and not self._open and not self.trains and self._active.trained:
            position, note = Position(self._mark.epoch + 1), NOTHING
        return {
            **note,
            **position.state_dict(),
            **self.asked,
            "global_batch": self.plan.global_batch,
            "group": self._feed.group,
            "seed": self.plan.seed,
            "length": self._feed.samples(position.epoch),
            "trains": self.trains,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lets the next `for` go on where `state` was taken, at any width, with global batches as large as there.

        A batch size that the script has changed since then counts. Ranks: all.

        Raises:
            DataError: `data-state`, `data-reshard`.
        """
        note = dict(state)
        numbers = [note.pop(name, None) for name in ("epoch", "samples", "seed")]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise DataError(
                "data-state",
                "this is not the state of a loader.",
                why=f"epoch, samples and seed must be whole numbers; found {dict(state)}",
                fix="pass what `state_dict()` of a prepared loader returned",
            )
        epoch, samples, seed = numbers
        length = note.pop("length", None)
        self.trains = note.pop("trains", False)
        self._active.trained |= self.trains
        self._resize({name: note.pop(name, None) for name in (*self.asked, "global_batch", "group")})
        self._feed.reseed(seed)
        if samples and length != self._feed.samples(epoch):
            warn_once(
                "data",
                f"the position was saved {samples} samples into an epoch of {length}, which now has "
                f"{self._feed.samples(epoch)}: the rest of it is not what it was; `set_epoch({epoch + 1})` leaves it out.",
            )
        self._start_at(Position(epoch, samples), note)

    def _resize(self, saved: Mapping[str, Any]) -> None:
        """Keeps the global batch of the run that saved, unless the script asks for another."""
        global_batch, group = saved["global_batch"], saved["group"]
        own_global_batch, own_group = self.plan.global_batch, self._feed.group
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

    # -- back, for a run that leaves and is saved as it was before (`evaluation_stop`) ----------------------------

    @property
    def under_way(self) -> bool:
        """Whether a loop over it is running."""
        return self._open > 0

    def place(self) -> Place:
        """Where it stands, for `put_back`."""
        return self._mark, self._position, self._note

    def put_back(self, place: Place) -> None:
        """Has `state_dict` say what it would have said when `place` was taken."""
        self._mark, self._position, self._note = place

    def take_back_batch(self) -> None:
        """Has `state_dict` say that the batch at hand was not given yet."""
        if self._previous is None:
            self.take_back_epoch()
        else:
            self._mark = self._previous

    def take_back_epoch(self) -> None:
        """Has `state_dict` say that no batch of the loop that is running was given yet."""
        self._start_at(*self._began)

    def _start_at(self, position: Position, note: Mapping[str, Any]) -> None:
        self._mark = None
        self._chosen = None
        self._position = position
        self._note = note

    # -- what a DataLoader is asked, and more of the kind -------------------------------------------------------

    @property
    def feed(self) -> Feed:
        """What reads the batches."""
        return self._feed

    @property
    def plan(self) -> DataPlan:
        """How samples are divided over the ranks."""
        return self._feed.plan

    @property
    def total_batch_size(self) -> int:
        """Samples in a global batch."""
        return self.plan.global_batch

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.original.dataset)  # type: ignore[arg-type]

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the epoch's last."""
        current = self.current
        return current is not None and current.last

    @property
    def remainder(self) -> int:
        """Real samples in a last global batch that is not full; 0 where it is, -1 where nobody knows or it is dropped."""
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


def _sized(samples: int, group: int) -> str:
    """A global batch in words."""
    return f"{group} of the sampler's batches" if group else f"{samples} samples"
