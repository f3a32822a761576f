"""What a loader's worker does first: it outlasts signals to everybody, and shows the user's dataset.

Batches are needed until all is saved, also after a SIGTERM or a Ctrl-C that goes to every process. But torch gives a
worker a handler that ends it at SIGTERM, after which its process fails: `DataLoader worker is killed by signal`. So here
the signal is blocked, and a thread takes it: from the worker's own process, or where that has ended, it ends the worker.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from paceline.data.augment import Augmented


class FirstCall:
    """The `worker_init_fn` of our loaders.

    Args:
        then: the user's own.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides what Ctrl-C means, and ends its workers
        if hasattr(signal, "sigwaitinfo"):  # not everywhere
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_take_sigterm, name="paceline-sigterm", daemon=True).start()
        # Code of the user's that asks for `get_worker_info().dataset` expects its own dataset. The fields of `info` cannot be
        # set in the usual way.
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, Augmented):
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.then is not None:
            self.then(worker)


def _take_sigterm() -> None:
    """Ends this worker at a SIGTERM that its own process has sent, or at any SIGTERM once that process has ended."""
    process = multiprocessing.parent_process()
    assert process is not None, "called in a worker"
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != process.pid and process.is_alive():
        pass
    os._exit(0)
