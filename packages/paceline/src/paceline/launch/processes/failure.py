"""Finds the process that failed first: the one with the earliest report or the earliest end."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator

from paceline.base.connections import LEFT, closed
from paceline.base.exits import PREEMPTED
from paceline.launch.launcher import Failure
from paceline.launch.processes.spawn import Worker, stop

# How long the other processes may take to end. Most wait in a collective that never ends, where no signal handler runs.
AFTER_FAILURE_S = 2.0
# When a process is killed, other ranks notice its closed connections before the launcher can see its end.
_SETTLE_S = 0.1
_EXIT_TIMEOUT_S = 5.0  # how long a process may take to end after its script has failed
_MAX_HEADLINE = 160  # characters
_CRASHED = "Fatal Python error: "  # the first words of faulthandler
_EXITED = re.compile(r"^SystemExit: (\d+)", re.MULTILINE)  # written by `worker.watched`


def first_failure(
    workers: list[Worker], node: int, pause: Callable[[float], object] = time.sleep, core_s: float = 0.0
) -> Failure | None:
    """If a process has failed, stops the others and returns the first failure; None for no failure.

    Args:
        workers: the processes of this node.
        node: the number of this node.
        pause: waits for some seconds; messages of other nodes are served meanwhile.
        core_s: how long a crashed process may take to end, because the kernel writes its core file first.
    """
    if all(worker.failed_at() is None for worker in workers):
        return None
    # The cause may show later than its effects, so wait a moment before the failures are compared.
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        # All workers are polled, because `poll` records when each has ended.
        codes = [worker.poll() for worker in workers]
        if None not in codes:
            break
        pause(0.01)
    failures = _failures(workers)
    first, first_at = min(failures, key=_order)
    failed = [worker for worker, _ in failures]
    exit_timeout_s = _EXIT_TIMEOUT_S
    # After a crash the kernel writes the core file, and the process only ends after that.
    if _CRASHED in first.report_text():
        exit_timeout_s = max(core_s, _EXIT_TIMEOUT_S)
    while first.poll() is None and first.failing_s() < exit_timeout_s:
        pause(0.01)
    # The report names a rank that is ending, and its exit code is needed. Rank 0 waits a moment before it closes the store.
    until = time.monotonic() + _EXIT_TIMEOUT_S
    while LEFT in first.report_text() and time.monotonic() < until and _left_before(first, until, workers) is None:
        pause(0.01)
    code = first.code or _code_in(first.report_text())
    frozen = [str(worker.process.rank) for worker in workers if worker.frozen_s()]
    # This is asked before `stop`, after which every process has ended.
    left = _left_before(first, until, workers)
    stop(workers, signal.SIGTERM, AFTER_FAILURE_S, pause)
    report = first.report_text()
    cause = first
    waiting: tuple[int, ...] = ()
    if left is not None:
        cause = left
        code = left.code or 0
        first_at = left.alive
        later = list(_after("", failed))
        waiting = tuple(worker.process.rank for worker in failed)
    else:
        later = list(_after(report, [worker for worker in failed if worker is not first]))
        later += [f"rank {rank} did not run: a signal had stopped it" for rank in frozen]
    process = cause.process
    return Failure(
        process.rank, process.local_rank, node, cause.pid, code, first_at, report, tuple(later), waiting=waiting
    )


def _code_in(report: str) -> int:
    """Returns the exit code with which a script has ended whose process has not ended yet."""
    exited = _EXITED.search(report)
    return int(exited[1]) if exited else 1


def _failures(workers: list[Worker]) -> list[tuple[Worker, float]]:
    """Returns the workers that have failed, and when each has failed (seconds since the epoch)."""
    failures = []
    for worker in workers:
        at = worker.failed_at()
        if at is not None:
            failures.append((worker, at))
    return failures


def _order(failure: tuple[Worker, float]) -> tuple[bool, float]:
    """Sorts causes before effects: a rank fails because another was killed, but no rank is killed by such a failure."""
    worker, at = failure
    return worker.code != -signal.SIGKILL, at


def _left_before(first: Worker, until: float, workers: list[Worker]) -> Worker | None:
    """The process whose end without an error closed a connection of `first`; None if no process ended like that by `until`."""
    if not closed(first.report_text()):
        return None
    left = [worker for worker in workers if worker.poll() in (0, PREEMPTED) and worker.ended <= until]
    # The first that ended is the cause. Others may have ended after it, and because of it.
    return min(left, key=lambda worker: worker.ended, default=None)


def end_frozen(workers: list[Worker], silence_limit_s: float) -> None:
    """Kills each process that a signal has stopped for longer than a collective may take, and writes this into its report.

    The other ranks cannot always notice: a call to the store has no timeout while rank 0, which holds it, is stopped.
    """
    for worker in workers:
        if worker.frozen_s() > silence_limit_s:
            with open(worker.report, "a", encoding="utf-8") as file:
                file.write(f"stopped by a signal for more than {silence_limit_s:g} s, and therefore killed")
            worker.send(signal.SIGKILL, whole_group=True)


def stuck(running: Worker) -> bool:
    """Returns whether a script has failed and its process does not end, for example because a thread still runs."""
    return running.code is None and running.failing_s() > _EXIT_TIMEOUT_S


def _after(report: str, later: list[Worker]) -> Iterator[str]:
    """Lines about the workers that failed after the first one. An error that all ranks raise is reported once."""
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
    """One line for a failure: the kind of crash, else the last line of the traceback, else the exit code."""
    # Only lines that are not indented: the others of a traceback show where it happened, and not what.
    lines = [line for line in ended.report_text().splitlines() if line[:1].strip()]
    crashes = [line for line in lines if line.startswith(_CRASHED)]
    headlines = crashes or lines
    if not headlines:
        return f"ended with {ended.code}"
    return headlines[-1][:_MAX_HEADLINE]
