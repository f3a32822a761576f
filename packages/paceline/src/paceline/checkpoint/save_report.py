"""`SaveReport`: how long a save took and kept the loop waiting, for whoever follows the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.world.events import SavedCheckpoint


class SaveReport:
    """Follows one save, from here on, to its end.

    Args:
        tell: is given what became of it; None on ranks that say nothing.
        path: of the checkpoint.
        step: optimizer steps done.

    Attributes:
        path: the same; it changes if another run has taken the automatic name.
    """

    def __init__(self, tell: Callable[[SavedCheckpoint], object] | None, path: str, step: int) -> None:
        self._tell = tell
        self.path = path
        self._step = step
        self._began = time.monotonic()
        self._stall_s: float | None = None

    def loop_goes_on(self) -> None:
        """Called when the loop goes on, because the rest of the save happens in the background."""
        self._stall_s = time.monotonic() - self._began

    def complete(self, size: int) -> None:
        """Called when the checkpoint is complete; `size` is its number of bytes."""
        self._end(size, "")

    @contextmanager
    def of_failure(self, undo: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Reports that the save has failed, where the `with` block fails; `undo` removes what it has left."""
        try:
            yield
        except BaseException as error:
            undo()
            self._end(None, str(error) or type(error).__name__)
            raise

    def _end(self, size: int | None, reason: str) -> None:
        if self._tell is None:
            return
        save_s = time.monotonic() - self._began
        stall_s = save_s if self._stall_s is None else self._stall_s
        self._tell(SavedCheckpoint(self._step, self.path, size, stall_s, save_s, size is not None, reason))
