"""`Background`: one piece of work at a time on a thread of its own; what it raised is raised later.

The thread is no daemon: the interpreter waits for it as it ends, whether it ends well or by an exception, and so does
`rendezvous.leave` where a process ends without the interpreter. A process that is killed takes its save with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from paceline.world import rendezvous

_log = logging.getLogger("paceline.checkpoint")


class Background:
    """Runs a save beside the loop."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._forget: Callable[[], None] = lambda: None

    @property
    def started(self) -> bool:
        """Whether there is work whose end nobody has heard of yet."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether the work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begins; the work before must have been waited for."""
        assert self._thread is None, "one at a time"
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline-save")
        self._forget = rendezvous.before_leaving(self._leave)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Waits for the end; gives, once, what the work raised."""
        if self._thread is not None:
            self._thread.join()
            self._forget()
        error, self._thread, self._error = self._error, None, None
        return error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised again by whoever waits
            self._error = error

    def _leave(self) -> None:
        """Nobody will wait any more, and who leaves can no longer agree with others: so the log has it."""
        if (error := self.wait()) is not None:
            _log.error("the last save, in the background, has failed: %s", error)
