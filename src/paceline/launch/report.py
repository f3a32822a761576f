"""What the launcher says of a failure: the first failing rank's traceback, then which it was and why it ended."""

from __future__ import annotations

import signal

from paceline.base.errors import Problem
from paceline.launch.launcher import Failure, Job

_HINTS = {
    signal.SIGKILL: "if nobody sent it, the system did for want of memory (see `dmesg`): use a smaller batch or fewer "
    "processes",
    signal.SIGSEGV: "a crash in compiled code: run with `--procs 1`, and look at the stack above",
    signal.SIGABRT: "compiled code gave up: look for its message above; with PACELINE_DEBUG=1 collectives that differ "
    "between ranks are named",
}


def describe(failure: Failure, job: Job) -> str:
    """The report, for standard error."""
    who = f"rank {failure.rank}"
    where = f"local rank {failure.local_rank}, node {failure.node}, " if job.nodes > 1 else ""
    lines = [failure.report, ""] if failure.report else []
    if failure.code < 0:
        number = -failure.code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        what, fix = f"{who} was ended by {name}.", _HINTS.get(number, f"find out who sent {name}")  # type: ignore[call-overload]
    else:
        what = f"{who} failed with exit code {failure.code}."
        fix = "mend the error above" if failure.report else "its own output above tells more"
    why = [f"it failed first ({where}pid {failure.pid}); the other processes were then stopped"]
    why += [f"failed after it: {each}" for each in failure.later]
    if job.nodes * job.procs == 1:
        why = [f"pid {failure.pid}"]
    return "\n".join([*lines, f"paceline.LaunchError: {Problem('rank-failed', what, why, fix)}"])
