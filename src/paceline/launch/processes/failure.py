"""Which process failed first: the one whose report, or whose end, came before all others'."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

from paceline.base.connections import LEFT, closed
from paceline.base.exits import PREEMPTED
from paceline.launch.launcher import Failure
from paceline.launch.processes.workers import Worker, stop

# What the others may take to end: most wait in a collective that never comes back, where no signal handler runs.
AFTER_FAILURE_S = 2.0
_SETTLE_S = 0.1  # a process that is killed closes its connections, which its peers notice, before its end can be seen
_LEAVING_S = 5.0  # what a process may take to end, once its script has failed
_LINE = 160
_CRASHED = "Fatal Python error: "  # how faulthandler begins


def first_failure(
    workers: list[Worker], node: int, pause: Callable[[float], object] = time.sleep, core_s: float = 0.0
) -> Failure | None:
    """Stops the other processes where one has failed, and says which was the first; None where none has.

    Args:
        workers: the processes of this node.
        node: its number.
        pause: waits a moment, and does meanwhile what else must go on.
        core_s: what a process that has crashed may take to end: the kernel writes its core file before that.
    """
    if all(worker.failed_at() is None for worker in workers):
        return None
    until = time.monotonic() + _SETTLE_S
    # A list: each of them is to be looked at, since a look is what tells when it ended.
    while time.monotonic() < until and any([worker.poll() is None for worker in workers]):
        pause(0.01)
    failures = _failures(workers)
    first, first_at = min(failures, key=_order)
    failed = [worker for worker, _ in failures]
    leaving_s = _LEAVING_S
    if _CRASHED in first.report_text():
        leaving_s = max(core_s, _LEAVING_S)
    while first.poll() is None and first.failing_s() < leaving_s:
        pause(0.01)
    # It names a rank that is on its way out, and whose exit code is wanted: rank 0 stays a moment for its store.
    until = time.monotonic() + _LEAVING_S
    while LEFT in first.report_text() and time.monotonic() < until and _left_before(first, until, workers) is None:
        pause(0.01)
    code = first.code or 1
    frozen = [str(worker.process.rank) for worker in workers if worker.frozen_s()]
    left = _left_before(first, until, workers)
    stop(workers, signal.SIGTERM, AFTER_FAILURE_S, pause)
    report = first.report_text()
    if left is not None:
        return Failure(
            left.process.rank,
            left.process.local_rank,
            node,
            left.pid,
            left.code or 0,
            at=left.alive,
            report=report,
            later=tuple(_after("", failed)),
            waiting=tuple(worker.process.rank for worker in failed),
        )
    later = list(_after(report, [worker for worker in failed if worker is not first]))
    later += [f"rank {rank} did not run: a signal had stopped it" for rank in frozen]
    return Failure(
        first.process.rank,
        first.process.local_rank,
        node,
        first.pid,
        code,
        at=first_at,
        report=report,
        later=tuple(later),
    )


def _failures(workers: list[Worker]) -> list[tuple[Worker, float]]:
    """The workers that have failed, each with when that was (seconds since the epoch)."""
    failures = []
    for worker in workers:
        at = worker.failed_at()
        if at is not None:
            failures.append((worker, at))
    return failures


def _order(failure: tuple[Worker, float]) -> tuple[bool, float]:
    """Which failure caused which: nobody is killed because a peer has failed, but many a peer fails as somebody is killed."""
    worker, at = failure
    return worker.code != -signal.SIGKILL, at


def _left_before(first: Worker, until: float, workers: list[Worker]) -> Worker | None:
    """The process whose end without an error cost `first` its connection; None where none ended so by `until`."""
    if not closed(first.report_text()):
        return None
    left = [worker for worker in workers if worker.poll() in (0, PREEMPTED) and worker.ended <= until]
    return min(left, key=lambda worker: worker.ended, default=None)


def end_frozen(workers: list[Worker], silence_limit_s: float) -> None:
    """Kills each process that a signal has stopped for longer than a collective may take: a failure, as its report says.

    Its peers cannot always notice: a call into the store that a stopped rank 0 keeps has no timeout.
    """
    for worker in workers:
        if worker.frozen_s() > silence_limit_s:
            with open(worker.report, "a", encoding="utf-8") as file:
                file.write(f"stopped by a signal for more than {silence_limit_s:g} s, and killed for that")
            worker.send(signal.SIGKILL, everyone=True)


def stuck(running: Worker) -> bool:
    """Whether its script has failed, yet the process does not end (a thread that nobody stops, say)."""
    return running.code is None and running.failing_s() > _LEAVING_S


def _after(report: str, later: list[Worker]) -> Iterator[str]:
    """What to say of those that failed after the first: errors that all ranks raise together are told once."""
    alike = []
    others = []
    for worker in later:
        if report and worker.report_text() == report:
            alike.append(str(worker.process.rank))
        else:
            others.append(worker)
    if alike:
        yield f"the same error on rank{'s' * (len(alike) > 1)} {', '.join(alike)}"
    for worker in others:
        yield f"failed after it: rank {worker.process.rank}: {_headline(worker)}"


def _headline(ended: Worker) -> str:
    """The line of its report that says of a crash which it was, else the last that begins the message of an exception."""
    lines = [line for line in ended.report_text().splitlines() if line[:1].strip()]
    lines = [line for line in lines if line.startswith(_CRASHED)] or lines
    return lines[-1][:_LINE] if lines else f"ended with {ended.code}"
