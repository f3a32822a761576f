"""The signals of the launcher: recorded and not raised, so that they interrupt no clean-up. Also `kill_with_parent`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_PASSED_ON = ("SIGUSR1", "SIGUSR2")  # batch systems send these as a warning; the script decides what they mean
# A batch system signals each process of a job, and each of them passes the signal on. Within this time they are one request.
_SAME_REQUEST_S = 0.5

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def kill_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent ends (on Linux only).

    `reaper.py` also kills the processes of a dead launcher, with all that they started, but it may have been killed too.

    Args:
        parent: the process id of the parent.
        signum: the signal.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it had ended before prctl was called
        os.kill(os.getpid(), signum)


class Signals:
    """Records signals from `enter` to `leave`.

    Args:
        pass_on: called with SIGUSR1 and SIGUSR2, in the signal handler.

    Attributes:
        ending: the signals that ask the launcher to end, in order of arrival.
        read: a file descriptor that becomes readable when one of these arrives.
        stacks_wanted: whether SIGUSR1 has arrived, which asks for the stacks of all ranks.
    """

    def __init__(self, pass_on: Callable[[int], None]) -> None:
        self.ending: list[int] = []
        self.stacks_wanted = False
        self._interrupts = False
        self._terminated_at = -_SAME_REQUEST_S
        self._passed_on = 0
        self.read, self._write = os.pipe()
        os.set_blocking(self.read, False)
        os.set_blocking(self._write, False)
        self._pass_on = pass_on
        self._before: dict[int, Any] = {}

    def stacks_given(self) -> None:
        """Forgets that the stacks of all ranks are wanted."""
        self.stacks_wanted = False

    def enter(self) -> None:
        """Installs the handlers. Does nothing outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in (*_ENDING, *_PASSED_ON):
            number = getattr(signal, name, None)
            # nohup sets SIGHUP to be ignored, and it must stay so.
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if signal.Signals(number).name in _PASSED_ON:
            self.stacks_wanted |= signal.Signals(number).name == "SIGUSR1"
            self._pass_on(number)
            return
        if number == signal.SIGTERM:
            now = time.monotonic()
            if now - self._terminated_at < _SAME_REQUEST_S:
                return
            self._terminated_at = now
        self.ending.append(number)
        os.write(self._write, b".")  # wakes the loop that waits for `read`
        if self._interrupts and number == signal.SIGINT:
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """While it is open, Ctrl-C also raises KeyboardInterrupt, for work that takes seconds, such as imports.

        Code that is imported may swallow the exception. Then `ending` still has the signal.
        """
        self._interrupts = True
        try:
            yield
        except BaseException:
            self.leave()  # also where an import fails: a notebook goes on afterwards
            raise
        finally:
            self._interrupts = False

    def take_new(self) -> list[int]:
        """Returns the signals in `ending` that have arrived since the last call."""
        new = self.ending[self._passed_on :]
        self._passed_on += len(new)
        return new

    def leave(self) -> None:
        """Restores the handlers of before; may be called again."""
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python, which Python cannot install again.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()
        if self.read >= 0:
            os.close(self.read)
            os.close(self._write)
            self.read = -1
