"""`ReducedGradients`: the applied strategies that reduce gradients of whole parameters by a `Reducer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import Tensor, nn

from paceline.parallel.data.reducer import Reducer
from paceline.parallel.strategy import AppliedStrategy, Context
from paceline.world.pending_gradients import PendingGradients


class ReducedGradients(AppliedStrategy):
    """One model and its reducer."""

    def __init__(self, model: nn.Module, reducer: Reducer) -> None:
        super().__init__(model)
        self.reducer = reducer

    @staticmethod
    def reducers_of(context: Context) -> Callable[[], Iterator[Reducer]]:
        """Returns a function that yields the reducers of the run's models so far."""

        def reducers() -> Iterator[Reducer]:
            for applied in context.siblings():
                if isinstance(applied, ReducedGradients):
                    yield applied.reducer

        return reducers

    def took_part(self, changed: set[Tensor]) -> set[Tensor]:
        """Adds the parameters whose gradients were taken for a reduction that has not ended."""
        return changed.union(slot.parameter for slot in self.reducer.slots if slot.taken)

    def hold_gradients(self, alone: bool = False) -> AbstractContextManager[None]:
        """While it is open, backward passes accumulate whole gradients in `.grad`."""
        return self.reducer.holding(alone)

    def leave_to_finish(self, is_left: bool) -> None:
        """Says whether `finish_reduction` follows the backward passes from now on."""
        self.reducer.leave_to_finish(is_left)

    def finish_reduction(self) -> None:
        """Reduces the remaining gradients, also those of parameters that this rank did not use. Ranks: all."""
        self.reducer.finish()

    def call_with_others(self, callback: Callable[[], None]) -> None:
        self.reducer.call_with_others(callback)

    def call_before_waiting(self, callback: Callable[[], None]) -> None:
        """Registers the callback at the end of a pass, before the reducer waits for votes and gradients."""
        self.reducer.before_waiting = callback

    def backward_failed(self) -> None:
        """Lets the next backward pass start with empty buckets."""
        self.reducer.backward_failed()

    def restore_pending(self, pending: PendingGradients) -> None:
        """Takes the gradients of a checkpoint, which are in `.grad`, for those of an open window."""
        self.reducer.mark_fresh()

    def release(self) -> None:
        """Takes the hooks back."""
        self.reducer.release()
