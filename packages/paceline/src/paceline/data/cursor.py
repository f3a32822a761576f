"""`Cursor`: where a loader is, in one value that is replaced as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.data.feed import NOTHING, Mark
from paceline.plan.data import Position


@dataclass(frozen=True)
class Cursor:
    """Where a loader is.

    Attributes:
        start: where the next epoch begins, if none has been begun.
        note: what the feed must know to begin there.
        mark: that of the last batch, in an epoch that was begun and not finished; None outside of one.
        chosen: the epoch that `set_epoch` has chosen while another one was running.
        is_loaded: whether the next iteration continues what `load_state_dict` has loaded.
        rest: the iterator over what was loaded, which has not given a batch yet; None without one.
    """

    start: Position = field(default_factory=Position)
    note: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    mark: Mark | None = None
    chosen: Position | None = None
    is_loaded: bool = False
    rest: weakref.ref[object] | None = None

    @property
    def position(self) -> Position:
        """The epoch, and the number of its samples that were yielded over all ranks."""
        if self.mark is None:
            return self.start
        return Position(self.mark.epoch, self.mark.consumed)

    def next_iteration(self) -> tuple[Position, Mapping[str, Any]]:
        """Returns where the next iteration begins, and the note for it."""
        if self.chosen is not None:
            return self.chosen, NOTHING
        if self.rest is not None:  # an iterator over the rest of this epoch was created
            return Position(self.start.epoch + 1), NOTHING
        # An epoch that was begun and interrupted is not continued by another `for`.
        if self.mark is not None:
            return Position(self.mark.epoch + 1), NOTHING
        return self.start, self.note
