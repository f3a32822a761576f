"""`LossWeights`: which losses of a run are looked at, and what was seen of them until the ranks compare themselves.

What is looked for, and how it is judged, is in `uncounted.py`. It is loaded once there is a loss to look at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from paceline.world.places import user_frame

if TYPE_CHECKING:
    from paceline.optim.uncounted import PassLookedAt, SeenLoss

_PASSES = 4  # at the start of a run that are looked at
_OTHER_PASSES = 8  # of those after them whose number of samples is another one, as in the last batch of an epoch
_EVERY = 64  # passes between two comparisons of the ranks, after the first ones
_JUDGED = 32  # losses that are remembered


def is_compared(number: int) -> bool:
    """Returns whether the ranks compare themselves after a pass: after the 1st, 2nd, 4th, ... 64th, and then each 64th."""
    return number % _EVERY == 0 or (number < _EVERY and number.bit_count() == 1)


class _Batch(Protocol):
    @property
    def loader(self) -> object: ...
    def place(self) -> tuple[int, ...]: ...


@dataclass
class LossWeights:
    """Looks at the first losses of a run, and judges what all ranks have seen."""

    _rows: int = 0  # of the last pass that was looked at
    _others: int = 0  # passes that were looked at after the first ones
    _open: list[PassLookedAt] = field(default_factory=list)  # the pass, and its micro-batches
    _noted: list[PassLookedAt] = field(default_factory=list)
    _judged: deque[Sequence[SeenLoss]] = field(default_factory=lambda: deque(maxlen=_JUDGED))  # each by rank

    def look(
        self,
        loss: Tensor,
        number: int,
        window: tuple[int, ...],
        rows: int,
        items: float | Tensor | None = None,
        source: _Batch | None = None,
        steps: int = 1,
    ) -> None:
        """Called before a backward pass; looks at it if it is one of the first, or has another number of samples than before.

        One after which the ranks compare themselves is looked at, too: factors may come from losses of earlier passes.

        Args:
            loss: of which the backward pass has not run yet, and which was not scaled.
            number: of the pass in the run, from 1.
            window: identifies the window, and which of its losses this is.
            rows: the samples that this rank has in the micro-batch.
            items: what the loss was passed with as `num_items`.
            source: the micro-batch, if it is one of a prepared loader.
            steps: the micro-batches of a window.
        """
        if number > _PASSES and not is_compared(number):
            if rows == self._rows or self._others == _OTHER_PASSES:
                return
            self._others += 1
        from paceline.optim.uncounted import SeenLoss, look_at

        self._rows = rows
        frame = user_frame()
        place = "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"
        # Two loaders may be at the same place.
        batch = () if source is None else (*source.place(), id(source.loader))
        self._open = [look_at(loss, SeenLoss(number, window, rows, items, place, steps, batch))]

    def look_inside(self, loss: Tensor, rows: int | None) -> None:
        """Called before the backward pass of each micro-batch of the pass, whose losses are parts of one.

        Args:
            loss: of the micro-batch.
            rows: the samples in it; None if there is nothing that counts them.
        """
        if self._open and rows and loss.grad_fn is not None:
            from paceline.optim.uncounted import look_at

            whole = self._open[0].loss
            self._open.append(look_at(loss, replace(whole, rows=1 if whole.has_items else rows)))

    def passed(self, factor: float) -> None:
        """Called after the backward pass.

        Args:
            factor: what the loss was multiplied by before it; 0 if this rank has no sample.
        """
        micro_batches = self._open[1:]
        if micro_batches and not micro_batches[0].loss.has_items:
            factor /= len(micro_batches)
        for each in micro_batches or self._open:
            each.close(factor)
            # The loss of a pipeline is computed by its last stage.
            if each.parts:
                self._noted.append(each)
        self._open = []

    def take(self) -> list[SeenLoss]:
        """Returns what was seen since the last call, which waits for the device."""
        noted, self._noted = self._noted, []
        return [each.seen() for each in noted]

    def judge_own(self) -> None:
        """Judges what one process has seen, which is alone: its micro-batches divide samples as ranks do."""
        if self._noted:
            self.judge([self.take()], is_sure=True)

    def judge(self, by_rank: Sequence[Sequence[SeenLoss]], is_sure: bool) -> None:
        """Warns of losses whose numbers depend on how samples are divided; see `uncounted.judge`."""
        if any(by_rank):
            from paceline.optim.uncounted import judge

            judge(self._judged, by_rank, is_sure)
