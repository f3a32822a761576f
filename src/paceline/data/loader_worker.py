"""Loader workers outlast a SIGTERM or a Ctrl-C that goes to everybody: batches are needed till all is saved.

torch gives a worker a handler that ends it at SIGTERM, after which its process fails: `DataLoader worker is killed by
signal`. So here the signal is blocked, and a thread takes it: from the worker's own process, or where that has ended, it
ends the worker as ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any


class Outlasting:
    """A worker's first call.

    Args:
        then: the first call that it would have had.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides what Ctrl-C means, and ends its workers
        if hasattr(signal, "sigwaitinfo"):  # not everywhere
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_take_sigterm, name="paceline-sigterm", daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _take_sigterm() -> None:
    process = multiprocessing.parent_process()
    assert process is not None, "called in a worker"
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != process.pid and process.is_alive():
        pass
    os._exit(0)
