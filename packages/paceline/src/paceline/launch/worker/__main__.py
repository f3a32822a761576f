"""`python -m paceline.launch.worker`: one worker, as a fresh process."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from paceline.launch.job import Target
from paceline.launch.processes.signals import kill_with_parent
from paceline.launch.worker import worker
from paceline.launch.worker.lines import write_whole_lines
from paceline.launch.worker.pickling import call_packed


def main(words: list[str]) -> int:
    """Runs what the launcher has written on the command line (`processes.spawn.spawn`); returns the exit code."""
    report, compat, streams, launcher, kind, name, *args = words
    kill_with_parent(int(launcher))
    if "lines" in streams.split(","):
        write_whole_lines(Path(report))
    if kind == "function":
        code = worker.call(partial(call_packed, name, compat), report)
    else:
        code = worker.run(Target(kind, name, tuple(args)), report, compat, shared="shared" in streams.split(","))
    if code:
        worker.leave_after_failure(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
