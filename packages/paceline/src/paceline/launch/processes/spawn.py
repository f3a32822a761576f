"""The worker processes of one round: started by fork or exec, and stopped together with all processes that they started."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.base import env as environment
from paceline.base.exits import PREEMPTED
from paceline.base.process_name import process_state
from paceline.launch.job import Job
from paceline.launch.launcher import Process
from paceline.launch.processes.signals import kill_with_parent
from paceline.launch.worker.lines import write_whole_lines

FUNCTION_FILE = "function"  # name of the file with a packed function, in the folder of the reports
_LEFT_BEHIND_S = 2.0  # how long processes that a script has left behind may take to end
_REAPER = Path(__file__).with_name("reaper.py")


@dataclass
class Worker:
    """A worker process.

    All times are of a monotonic clock, except `alive`.

    Attributes:
        process: its row in the world table.
        pid: its process id.
        report: the file for its traceback.
        leads: whether it leads a process group, which holds all processes that it starts.
        popen: the handle of a fresh process; None for a forked one.
        code: the exit code, or the negative number of the signal that ended it; None while it runs.
        ended: when its end was seen.
        alive: when it was last seen running (seconds since the epoch); compared with the times of report files.
        stopped: whether the launcher stopped it, so that its end is not a failure.
        failing: when its script was first seen to have failed; None if it has not failed.
        frozen: since when a signal (SIGSTOP) keeps it from running; None if none does.
    """

    process: Process
    pid: int
    report: Path
    leads: bool
    popen: subprocess.Popen[bytes] | None = None
    code: int | None = None
    ended: float = 0.0
    alive: float = field(default_factory=time.time)
    stopped: bool = False
    failing: float | None = None
    frozen: float | None = None

    def poll(self) -> int | None:
        """Checks whether the process has ended. Returns its exit code; None while it runs."""
        if self.code is None:
            if self.popen is not None:
                self.code = self.popen.poll()
            else:
                # A forked process has no `Popen`. `waitpid` gives 0 while the child runs.
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.code = os.waitstatus_to_exitcode(status)
            if self.code is not None:
                self.ended = time.monotonic()
            else:
                self.alive = time.time()
        return self.code

    def frozen_s(self) -> float:
        """How long SIGSTOP or a similar signal has kept it from running; 0 for not at all, or where the system cannot tell."""
        if process_state(self.pid) != "T" or self.code is not None:
            self.frozen = None
            return 0.0
        if self.frozen is None:
            self.frozen = time.monotonic()
        return max(time.monotonic() - self.frozen, 1e-9)  # never 0, which means that nothing stops the process

    def send(self, signum: int, *, whole_group: bool = False) -> bool:
        """Sends a signal to the process, or to its whole process group. Returns False if no process is left."""
        try:
            if whole_group and self.leads:
                os.killpg(self.pid, signum)
            elif self.code is None:
                os.kill(self.pid, signum)
            else:
                return False  # the process was waited for, so its id may belong to another process by now
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def failing_s(self) -> float:
        """How long ago its script was first seen to have failed; 0 if it has not failed."""
        if self.failing is None and self.failed_at() is not None:
            self.failing = time.monotonic()
        if self.failing is None:
            return 0.0
        return time.monotonic() - self.failing

    def failed_at(self) -> float | None:
        """When it failed (seconds since the epoch): the time of its report, else when it was last seen running; None if never.

        A process that was killed writes no report, and the other ranks may report their lost connection before the launcher
        sees its end. A process that has saved and ended, as it was asked to, has not failed.
        """
        if self.code == PREEMPTED:
            return None
        with contextlib.suppress(FileNotFoundError):
            status = self.report.stat()
            # The file exists as soon as the process has started; it stays empty if nothing fails.
            if status.st_size:
                return status.st_mtime
        if self.code in (None, 0) or self.stopped:
            return None
        return self.alive

    def report_text(self) -> str:
        """Its traceback, or ""."""
        with contextlib.suppress(FileNotFoundError):
            return self.report.read_text(encoding="utf-8", errors="replace").rstrip()
        return ""


class Reaper:
    """The process `reaper.py`, which kills the workers if the launcher is killed.

    Args:
        folder: a folder that it removes when the launcher has ended.
    """

    def __init__(self, folder: Path) -> None:
        read, self._write = os.pipe()
        command = [sys.executable, "-I", "-S", str(_REAPER), str(folder)]
        self._process = subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(read)

    def add(self, pid: int) -> None:
        """Adds a process group that must not outlive the launcher."""
        self._say(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Removes a process group that has ended."""
        self._say(f"-{pid}\n")

    def _say(self, line: str) -> None:
        # If somebody has killed the reaper, the run goes on without it.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write, line.encode())

    def close(self) -> None:
        """Ends the reaper, and the process groups that are still listed."""
        os.close(self._write)
        self._process.wait()

    def leave(self) -> None:
        """In a forked process: closes this end of the pipe. The reaper would otherwise wait for that process too."""
        os.close(self._write)
        self._process.returncode = 0  # it is not a child of the forked process, so Popen must not wait for it


def spawn(
    job: Job,
    process: Process,
    report: Path,
    streams: Mapping[int, int],
    *,
    leads: bool,
    shared: bool,
    shares_output: bool,
) -> Worker:
    """Starts a fresh process; `shared` as in `worker.run`, `shares_output` as in `enter_forked_worker`."""
    target = job.target.on(process.local_rank)
    kill_first = None
    if target.kind == "program":
        command = [target.name, *target.args]
        # A worker of Paceline does this by itself; another program cannot.
        kill_first = partial(kill_with_parent, os.getpid())
    else:
        name = str(report.with_name(FUNCTION_FILE)) if target.kind == "function" else target.name
        words = []
        if shares_output:
            words.append("lines")
        if shared:
            words.append("shared")
        own = [str(report), job.compat, ",".join(words), str(os.getpid())]
        command = [sys.executable, "-m", "paceline.launch.worker", *own, target.kind, name, *target.args]
    popen = subprocess.Popen(
        command,
        env={**environment.snapshot(), **process.env},
        stdin=subprocess.DEVNULL if leads else None,
        stdout=streams.get(1),
        stderr=streams.get(2),
        process_group=0 if leads else None,
        preexec_fn=kill_first,
    )
    if process.cores:
        # This must come at once: it binds only the main thread, and the threads that this starts later.
        os.sched_setaffinity(popen.pid, process.cores)
    return Worker(process, popen.pid, report, leads, popen)


def enter_forked_worker(
    process: Process, report: Path, streams: Mapping[int, int], launcher: int, *, leads: bool, shares_output: bool
) -> None:
    """Sets up a forked worker: process group, environment, cores, streams and random numbers. It ends with the launcher.

    Args:
        shares_output: whether it must write whole lines, because others write to the same terminal or the launcher copies them.
    """
    kill_with_parent(launcher)
    if process.cores:
        os.sched_setaffinity(0, process.cores)
    if leads:
        os.setpgid(0, 0)
        # A process outside of the terminal's foreground group is stopped when it reads from the terminal.
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    for number, end in streams.items():
        os.dup2(end, number)
    environment.export(process.env)
    if not isinstance(sys.stdout, io.TextIOWrapper):
        # The streams of a notebook work only in the notebook's own process.
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if shares_output:
        write_whole_lines(report)
    if "torch" in sys.modules:
        from paceline.torch_internals.forks import renew_threads

        threads = process.env.get("OMP_NUM_THREADS", "")  # which OpenMP has read in the parent already
        renew_threads(int(threads) if threads.isdigit() else None)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()  # as in a fresh process; the module `random` reseeds itself after a fork


def stop(
    workers: list[Worker],
    signum: int,
    grace_s: float,
    pause: Callable[[float], object] = time.sleep,
    hurry: Callable[[], object] = bool,
) -> None:
    """Stops workers and all processes that they started: sends a signal, and SIGKILL to the process groups after `grace_s`.

    Args:
        workers: the workers.
        signum: the signal that asks them to end.
        grace_s: how long they may take.
        pause: waits for some seconds; messages of other nodes are served meanwhile.
        hurry: returns true to stop waiting.
    """
    request_end(workers, signum, grace_s, pause, hurry)
    kill_groups(workers, pause)


def request_end(
    workers: list[Worker], signum: int, grace_s: float, pause: Callable[[float], object], hurry: Callable[[], object]
) -> bool:
    """Asks workers to end and waits for their end; the arguments are those of `stop`. Returns whether all ended in time."""
    for worker in workers:
        if worker.poll() is None:
            worker.stopped = True
            worker.send(signum)
    deadline = time.monotonic() + grace_s
    while any(worker.poll() is None for worker in workers):
        if time.monotonic() > deadline or hurry():
            return False
        pause(0.01)
    return True


def kill_groups(workers: list[Worker], pause: Callable[[float], object]) -> None:
    """Kills workers that still run, and stops the processes that are left in their process groups."""
    for worker in workers:
        if worker.poll() is None:
            worker.stopped = True
            worker.send(signal.SIGKILL, whole_group=True)
    # A group outlives its leader while a process that the script has started still runs. These may end by themselves.
    left = [worker for worker in workers if worker.send(signal.SIGTERM, whole_group=True)]
    deadline = time.monotonic() + _LEFT_BEHIND_S
    while left and time.monotonic() < deadline:
        pause(0.01)
        # Signal 0 is not delivered; it only shows whether the group still has a process.
        left = [worker for worker in left if worker.poll() is None or worker.send(0, whole_group=True)]
    for worker in left:
        worker.send(signal.SIGKILL, whole_group=True)
    while any(worker.poll() is None for worker in workers):
        pause(0.01)
