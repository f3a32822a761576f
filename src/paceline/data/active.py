"""Which loader is being iterated right now: what `backward` and `gather_for_metrics` ask to know the real samples."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.data.loader import PreparedLoader


class ActiveLoaders:
    """A stack of the loaders that are being iterated: an evaluation inside a training loop lies on top of it.

    A loader's iterator pushes and removes in `try ... finally`, so that `break` and exceptions leave nothing behind.
    """

    def __init__(self) -> None:
        self._stack: list[PreparedLoader] = []
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

    def push(self, loader: PreparedLoader) -> None:
        """Called by a loader's iterator as it starts."""
        self._stack.append(loader)
        self._finished = None

    def remove(self, loader: PreparedLoader, finished: bool = False) -> None:
        """Takes out the latest entry of `loader`, which need not be the top: loops may be interleaved by hand."""
        self._finished = weakref.ref(loader) if finished else None
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is loader:
                del self._stack[place]
                return

    def __len__(self) -> int:
        return len(self._stack)
