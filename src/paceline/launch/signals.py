"""Signals that reach the launcher: noted, never raised, so that no clean-up is cut short."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_PASSED_ON = ("SIGUSR1", "SIGUSR2")  # batch systems send these as a warning; the script decides what they mean


class Signals:
    """Notes signals from `enter` to `leave`.

    Attributes:
        ending: those that ask the launcher to end, in order of arrival.
        read: becomes readable when one arrives.
    """

    def __init__(self, pass_on: Callable[[int], None]) -> None:
        self.ending: list[int] = []
        self.read, self._write = os.pipe()
        os.set_blocking(self.read, False)
        os.set_blocking(self._write, False)
        self._pass_on = pass_on
        self._before: dict[int, Any] = {}

    def enter(self) -> None:
        """Installs the handlers; none outside the main thread, where Python allows none."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in (*_ENDING, *_PASSED_ON):
            number = getattr(signal, name, None)
            # nohup has set SIGHUP to be ignored: so it stays
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if signal.Signals(number).name in _PASSED_ON:
            self._pass_on(number)
        else:
            self.ending.append(number)
            os.write(self._write, b".")

    def leave(self) -> None:
        """Puts back what was there; may be called again."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()
        if self.read >= 0:
            os.close(self.read)
            os.close(self._write)
            self.read = -1
