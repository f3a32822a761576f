"""`Background`: one piece of work at a time on a thread of its own; what it raised is raised later.

    the script goes on      the next call of the script that saves, loads, waits or ends raises it
    the script is over      `finish` raises it: called by the launcher's worker after the script, and by Python as it ends
    a process is killed     its save goes with it

The thread is no daemon: whoever ends waits for it.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  before `_end_of_python` is registered, see there
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable

from paceline.world import lifetime

_log = logging.getLogger("paceline.checkpoint")
_all: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Runs a save beside the loop."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._forget: Callable[[], None] = lambda: None
        self._process = os.getpid()
        _all.add(self)

    @property
    def started(self) -> bool:
        """Whether work was started that nobody has waited for yet."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether the work goes on."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begins work; the work before it must have been waited for."""
        assert self._thread is None, "one at a time"
        _watch_for_end_of_python()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(work,), name="paceline-save")
        self._forget = lifetime.of_process().work.subscribe(lambda _: self._leave())
        self._thread.start()

    def wait(self) -> Exception | None:
        """Waits for the end; gives, once, what the work raised."""
        if self._thread is not None:
            self._thread.join()
            self._forget()
        error = self._error
        self._thread = None
        self._error = None
        return error

    def finish(self) -> Exception | None:
        """Does the same at the end of the script; nothing in a forked child, since the work belongs to its parent."""
        return self.wait() if self._process == os.getpid() else None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised again by whoever waits
            self._error = error

    def _leave(self) -> None:
        """Called before the process group ends: logs an error that nobody has waited for."""
        error = self.wait()
        if error is not None:
            _log.error("the last save, in the background, has failed: %s", error)


def finish() -> None:
    """Waits for saves that are under way when a script is over.

    Raises:
        Exception: what the last of them raised. Others that failed are in the log.
    """
    ends = [background.finish() for background in list(_all)]
    errors = [error for error in ends if error is not None]
    for error in errors[:-1]:
        _log.error("a save in the background has failed: %s", error)
    if errors:
        errors[-1].add_note("This was the last save, in the background: it was under way when the script ended.")
        raise errors[-1]


_watching = False


def _watch_for_end_of_python() -> None:
    """Has `_end_of_python` called, before the functions of `atexit` and before Python waits for threads.

    Python calls these in reverse order: that of `concurrent.futures`, after which no pool takes work, has been registered
    when it was imported above, and so comes after ours.
    """
    global _watching
    if not _watching:
        _watching = True
        threading._register_atexit(_end_of_python)  # type: ignore[attr-defined]


def _end_of_python() -> None:
    """Ends the process with exit code 1 where the last save has failed: by now no exception can do that.

    Everything else that is to happen as Python ends happens before: whoever registered with `atexit` is called.
    """
    try:
        finish()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if multiprocessing.parent_process() is None:  # in a child Python calls none of them either
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
                stream.flush()
        os._exit(1)
