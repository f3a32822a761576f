"""The processes of one attempt: started by fork or exec, told apart by pid, ended with all that they started."""

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
from paceline.launch.launcher import Job, Process
from paceline.launch.processes.signals import kill_with_parent
from paceline.launch.worker.worker import whole_lines
from paceline.world.stacks import procfs

FUNCTION_FILE = "function"  # name of the file with a packed function, in the folder of the reports
_REAPER = Path(__file__).with_name("reaper.py")


@dataclass
class Worker:
    """One process that was started.

    Attributes:
        process: its row in the world table.
        pid: its number.
        report: file for its traceback.
        leads: whether it leads a process group, in which all that it starts stays.
        popen: the handle of a fresh process; None of a forked one.
        code: how it ended: exit code, or the negative number of the signal; None while it runs.
        ended: when that was seen; as all times here but `alive`, of a clock that only goes forward.
        alive: when it was last seen running (seconds since the epoch): compared with when reports were written.
        stopped: whether we ended it, so that its end is no failure of its own.
        failing: since when its script is known to have failed; None while it is not.
        frozen: since when a signal keeps it from running; None where none does.
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
        """Looks whether it has ended."""
        if self.code is None:
            if self.popen is not None:
                self.code = self.popen.poll()
            else:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.code = os.waitstatus_to_exitcode(status)
            if self.code is not None:
                self.ended = time.monotonic()
            else:
                self.alive = time.time()
        return self.code

    def frozen_s(self) -> float:
        """How long SIGSTOP, or a signal like it, has kept it from running; 0 where none does or the system cannot tell."""
        if procfs.state(self.pid) != "T" or self.code is not None:
            self.frozen = None
            return 0.0
        if self.frozen is None:
            self.frozen = time.monotonic()
        return max(time.monotonic() - self.frozen, 1e-9)

    def send(self, signum: int, *, everyone: bool = False) -> bool:
        """Sends a signal to it, or to everyone in its process group; False where nobody is left."""
        try:
            if everyone and self.leads:
                os.killpg(self.pid, signum)
            elif self.code is None:
                os.kill(self.pid, signum)
            else:
                return False
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def failing_s(self) -> float:
        """How long it has been known that its script failed; 0 where it did not."""
        if self.failing is None and self.failed_at() is not None:
            self.failing = time.monotonic()
        if self.failing is None:
            return 0.0
        return time.monotonic() - self.failing

    def failed_at(self) -> float | None:
        """When it failed by itself (seconds since the epoch): as it wrote its report, else as it was last seen; or None.

        One that was killed writes nothing, and its peers may write that they miss it before anybody looks at it again.
        One that has saved and ended, as it was asked to, has not failed.
        """
        if self.code == PREEMPTED:
            return None
        with contextlib.suppress(FileNotFoundError):
            status = self.report.stat()
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
    """The launcher's end of `reaper.py`, which ends all processes should the launcher be killed.

    Args:
        folder: removed at the end, whatever the end is.
    """

    def __init__(self, folder: Path) -> None:
        read, self._write = os.pipe()
        command = [sys.executable, "-I", "-S", str(_REAPER), str(folder)]
        self._process = subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(read)

    def add(self, pid: int) -> None:
        """A process group that must not outlive this process."""
        self._say(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """A process group that has ended."""
        self._say(f"-{pid}\n")

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody ended it: then it cannot help, nor need it
            os.write(self._write, line.encode())

    def close(self) -> None:
        """Ends it; whatever is still listed ends too."""
        os.close(self._write)
        self._process.wait()

    def leave(self) -> None:
        """In a forked process: drops this end, without which the reaper would wait for that process too."""
        os.close(self._write)
        self._process.returncode = 0  # it is no child of the forked process


def spawn(job: Job, process: Process, report: Path, streams: Mapping[int, int], *, leads: bool, shared: bool) -> Worker:
    """Starts a fresh process; `shared` as in `worker.run`."""
    target = job.target.on(process.local_rank)
    kill_first = None
    if target.kind == "program":
        command = [target.name, *target.args]
        # Our own worker asks for this itself; another program cannot.
        kill_first = partial(kill_with_parent, os.getpid())
    else:
        name = str(report.with_name(FUNCTION_FILE)) if target.kind == "function" else target.name
        words = ["lines"] * bool(job.tee) + ["shared"] * shared
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
    if process.cores:  # before it has had the time to start a thread
        os.sched_setaffinity(popen.pid, process.cores)
    return Worker(process, popen.pid, report, leads, popen)


def settle(process: Process, streams: Mapping[int, int], launcher: int, *, leads: bool) -> None:
    """In a forked process: its own group, environment, cores, streams and random numbers; it ends with the launcher."""
    kill_with_parent(launcher)
    if process.cores:
        os.sched_setaffinity(0, process.cores)
    if leads:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    for number, end in streams.items():
        os.dup2(end, number)
    environment.export(process.env)
    if not isinstance(sys.stdout, io.TextIOWrapper):  # a notebook's stream belongs to the notebook's own process
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    if streams:
        whole_lines()
    threads = process.env.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(threads))  # OpenMP has read its variable long ago, in the parent
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()  # as in a fresh process; Python's own `random` does so by itself


def stop(
    workers: list[Worker],
    signum: int,
    grace_s: float,
    pause: Callable[[float], object] = time.sleep,
    hurry: Callable[[], object] = bool,
) -> None:
    """Ends workers and all they started: a signal to each, and SIGKILL to its whole group after `grace_s`.

    Args:
        workers: whom.
        signum: number of the signal that asks them.
        grace_s: seconds that they have.
        pause: waits a moment, and does meanwhile what else must go on.
        hurry: whether to wait no longer.
    """
    ask(workers, signum, grace_s, pause, hurry)
    sweep(workers, pause)


def ask(
    workers: list[Worker],
    signum: int,
    grace_s: float,
    pause: Callable[[float], object] = time.sleep,
    hurry: Callable[[], object] = bool,
) -> bool:
    """Asks workers to end, and waits until they have; whether all have within `grace_s`. Arguments as of `stop`."""
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


def sweep(workers: list[Worker], pause: Callable[[float], object] = time.sleep, grace_s: float = 2.0) -> None:
    """Ends what is left of each worker's process group; a worker that still runs is killed."""
    for worker in workers:
        if worker.poll() is None:
            worker.stopped = True
            worker.send(signal.SIGKILL, everyone=True)
    left = [worker for worker in workers if worker.send(signal.SIGTERM, everyone=True)]
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        pause(0.01)
        # Signal 0 reaches nobody, and says whether somebody of the group is there.
        left = [worker for worker in left if worker.poll() is None or worker.send(0, everyone=True)]
    for worker in left:
        worker.send(signal.SIGKILL, everyone=True)
    while any(worker.poll() is None for worker in workers):
        pause(0.01)
