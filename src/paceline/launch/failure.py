"""Which process failed first: the one whose report, or whose end, came before all others'."""

from __future__ import annotations

import signal
import time

from paceline.launch.launcher import Failure
from paceline.launch.processes import Worker, stop

AFTER_FAILURE_S = 10.0  # what the others may take to end
_LEAVING_S = 5.0  # what a process may take to end, once its script has failed
_LINE = 160


def first_failure(workers: list[Worker], node: int) -> Failure | None:
    """Stops the other processes where one has failed, and says which was the first; None where none has."""
    failed = {each.pid: at for each in workers if (at := each.failed_at()) is not None}
    if not failed:
        return None
    first = min((each for each in workers if each.pid in failed), key=lambda each: failed[each.pid])
    while first.poll() is None and time.time() - failed[first.pid] < _LEAVING_S:
        time.sleep(0.01)
    code = first.code if first.code else 1
    stop(workers, signal.SIGTERM, AFTER_FAILURE_S)
    later = [each for each in workers if each.pid in failed and each is not first]
    return Failure(
        first.process.rank, first.process.local_rank, node, first.pid, code, failed[first.pid], first.told(),
        tuple(f"rank {each.process.rank}: {_last_line(each)}" for each in later),
    )  # fmt: skip


def stuck(running: Worker) -> bool:
    """Whether its script has failed, yet the process does not end (a thread that nobody stops, say)."""
    failed_at = running.failed_at() if running.code is None else None
    return failed_at is not None and time.time() - failed_at > _LEAVING_S


def _last_line(ended: Worker) -> str:
    text = ended.told()
    return text.splitlines()[-1][:_LINE] if text else f"ended with {ended.code}"
