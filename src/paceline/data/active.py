"""Which loader is being iterated right now: what `backward` and `gather_for_metrics` ask to know the real samples."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from paceline.world.events import Events

if TYPE_CHECKING:
    from paceline.data.loader import PreparedLoader

T = TypeVar("T")


class ActiveLoaders:
    """A stack of the loaders that are being iterated: an evaluation inside a training loop lies on top of it.

    A loader's iterator pushes and removes in `try ... finally`, so that `break` and exceptions leave nothing behind.

    Args:
        events: of the run; this is where it is known that two batches have a moment between them, and that an epoch ends.

    Attributes:
        trained: whether any loader trains.
        unused: whether a loader that trains gave a batch that no backward pass has followed.
    """

    def __init__(self, events: Events | None = None) -> None:
        self.trained = False
        self.unused = False
        self._events = Events() if events is None else events
        self._stack: list[PreparedLoader] = []
        self._interleaved: set[int] = set()  # ids of those that advance while loops that began later are under way
        # Weak: a loader that the user drops must end its workers, not wait for the next loop.
        self._finished: weakref.ref[PreparedLoader] | None = None

    @property
    def top(self) -> PreparedLoader | None:
        """The loader whose iteration began last and has not ended; None outside of all loops."""
        return self._stack[-1] if self._stack else None

    @property
    def finished(self) -> PreparedLoader | None:
        """The loader whose epoch ended last, until another iteration begins: what was collected over it is known yet."""
        return self._finished() if self._finished is not None else None

    @property
    def idle(self) -> bool:
        """Whether the batch at hand has no sample for this rank, and a filler row of weight 0 instead."""
        current = self.top.current if self.top is not None else None
        return current is not None and current.weights[current.index] == 0

    def push(self, loader: PreparedLoader) -> None:
        """Called by a loader's iterator as it starts."""
        self._stack.append(loader)
        self._interleaved.discard(id(loader))
        self._finished = None

    def remove(self, loader: PreparedLoader, finished: bool = False) -> None:
        """Takes out the latest entry of `loader`, which need not be the top: loops may be interleaved by hand."""
        self._finished = weakref.ref(loader) if finished else None
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is loader:
                del self._stack[place]
                return

    def train(self) -> None:
        """Called by each backward pass: the loaders that are being iterated are those that train."""
        self.unused = False
        self.trained |= bool(self._stack)
        for loader in self._stack:
            loader.train()

    def give(self, loader: PreparedLoader) -> None:
        """Called by a loader's iterator as it gives a batch."""
        self.unused |= loader.trains
        if loader is not self.top:
            self._interleaved.add(id(loader))

    def ask(self, loader: PreparedLoader) -> None:
        """Called by a loader's iterator when it is asked for another batch: may be a moment between two batches.

        It is none where a batch of another loader waits for its backward pass, nor inside the body of a loop over another
        loader that trains. One that has advanced meanwhile is no such loop around this one, but goes beside it.
        """
        if not loader.trains:
            if self.trained:
                self._events.between_evaluation_batches()
            return
        if self.unused or not self._events.between_batches:
            return
        around = self._stack[: self._stack.index(loader)]
        if not any(outer.trains and id(outer) not in self._interleaved for outer in around):
            self._events.between_batches()

    def end(self, loader: PreparedLoader) -> None:
        """Called by a loader's iterator once all batches were given, while its position is still that of the last one."""
        if loader.trains:
            self._events.epoch_over()

    def measured(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; waiting for each is the phase "data" of the step, where somebody measures phases."""
        return self._in_phase(batches) if self._events.phase else batches

    def _in_phase(self, batches: Iterator[T]) -> Iterator[T]:
        try:
            while True:
                with self._events.phase("data"):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                yield batch
        finally:
            close: Callable[[], None] | None = getattr(batches, "close", None)
            if close is not None:
                close()

    def training(self) -> list[PreparedLoader]:
        """Loaders that train and are being iterated, the outermost first."""
        return [loader for loader in self._stack if loader.trains]

    def __len__(self) -> int:
        return len(self._stack)
