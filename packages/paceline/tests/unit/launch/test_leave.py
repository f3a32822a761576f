"""How a forked process ends."""

import multiprocessing
import os
import time

import pytest

from paceline.launch.worker.worker import leave


def test_daemons_end_before_the_process_that_started_them():
    """Workers of loaders that are left behind hold the output of a process open, and so whoever reads it."""
    fork = multiprocessing.get_context("fork")
    mine = fork.Process(target=time.sleep, args=(60,), daemon=True)
    mine.start()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        worker = fork.Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
        os.write(writes, str(worker.pid).encode())
        leave(3)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        with pytest.raises(ProcessLookupError):
            os.kill(int(os.read(reads, 20)), 0)
        assert mine.is_alive()
    finally:
        mine.kill()
        mine.join()
        os.close(reads)
        os.close(writes)
