"""Processes of this host: started, watched, started again after a failure, and ended together.

    wait:  torch imported once (fork) -> [start -> watch -> stop -> report] for each attempt -> Outcome

With "fork" the processes are copies of a parent that has imported torch, so that it is imported once and not once a
rank; the parent never starts a thread nor touches a device, without which a copy would not be whole. A forked process
runs the script and then *returns* from `wait`, up the caller's stack, so that Python ends there as it always does.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path

from paceline.launch import host, worker
from paceline.launch.failure import AFTER_FAILURE_S, first_failure, stuck
from paceline.launch.launcher import Job, Outcome, Process, Rendered
from paceline.launch.nodes import Nodes
from paceline.launch.output import Output
from paceline.launch.processes import PARCEL, Reaper, Worker, settle, spawn, stop, sweep
from paceline.launch.report import describe
from paceline.launch.signals import Signals

_INTERRUPT_S, _TERMINATE_S = 3.0, 30.0  # Ctrl-C is impatient; SIGTERM asks a script to save and go


class LocalLauncher:
    """Starts processes on this host."""

    name = "local"

    def available(self) -> str:
        """Always "": there is a this host everywhere."""
        return ""

    def render(self, job: Job) -> Rendered:
        """The processes of this node with torchrun's variables; port 0 stands for one that is found at the start."""
        return Rendered(job, job.target.command, world_table(job, [job.procs] * job.nodes, job.main_port, 0))

    def submit(self, rendered: Rendered) -> LocalHandle:
        """Checks the job; the processes run in `wait`.

        Raises:
            LaunchError: those of `host.check`.
        """
        host.check(rendered.job)
        return LocalHandle(rendered)


def world_table(job: Job, procs: list[int], port: int, attempt: int) -> tuple[Process, ...]:
    """The processes of this node.

    Args:
        job: what is to run.
        procs: how many processes each node has.
        port: where rank 0 listens.
        attempt: how often they were started before.
    """
    first, size = sum(procs[: job.node_rank]), sum(procs)
    local_size = procs[job.node_rank] if job.node_rank < len(procs) else job.procs
    return tuple(
        Process(
            first + local_rank,
            local_rank,
            {
                **job.env,
                "RANK": str(first + local_rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(local_size),
                "GROUP_RANK": str(job.node_rank),
                "GROUP_WORLD_SIZE": str(job.nodes),
                "MASTER_ADDR": job.main_address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "paceline",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
                "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 holds the store: a new one for each attempt
            },
        )
        for local_rank in range(local_size)
    )


class LocalHandle:
    """A job of this host."""

    def __init__(self, rendered: Rendered) -> None:
        self.job = rendered.job
        self.workers: list[Worker] = []
        self.output = Output(self.job.log_dir, self.job.tee, self.job.mark)
        self.signals = Signals(self._pass_on)
        self._mine = os.getpid()

    def wait(self) -> Outcome:
        """Runs the job to its end, restarts included.

        In a forked process this returns too, with `in_worker` set, at the end of the script.

        Raises:
            LaunchError: those of `Nodes.meet`.
        """
        self.nodes = Nodes.meet(self.job)
        folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self.reaper = Reaper(folder)
        if self.job.start == "fork":
            import torch  # noqa: F401

            if self.job.target.function is None:
                gc.freeze()  # no collection touches, and so copies, what the processes share
        elif self.job.target.function is not None:
            worker.pack(self.job.target.function, str(folder / PARCEL))
        self.signals.enter()
        try:
            for attempt in range(self.job.max_restarts + 1):
                if not self.nodes.attempt(attempt, lambda: self.signals.ending):
                    return Outcome(1, elsewhere=self.nodes.trouble, restarts=attempt)
                begun = self._start(folder, attempt)
                if isinstance(begun, Path):
                    return Outcome(self._work(str(begun)), in_worker=True)
                outcome = self._attempt(attempt, begun)
                if not (outcome.failure or outcome.elsewhere) or attempt == self.job.max_restarts:
                    break
                again = f"paceline: starting all again (restart {attempt + 1} of {self.job.max_restarts})"
                print(describe(outcome, self.job), again, sep="\n", file=sys.stderr, flush=True)
            return outcome
        finally:
            if os.getpid() == self._mine:  # not in a forked process
                self.signals.leave()
                self.nodes.close()
                self.reaper.close()

    def _work(self, report: str) -> int:
        """In a forked process: runs the target; a function's process does not come back from here."""
        if self.job.target.function is None:
            return worker.run(self.job.target, report, self.job.compat)
        code = 1
        try:
            code = worker.call(self.job.target.function, report)
        finally:
            worker.leave(code)

    def _start(self, folder: Path, attempt: int) -> socket.socket | Path:
        """Starts all processes.

        Returns:
            In the launcher the socket that holds rank 0's port; in a forked process the file for its report.
        """
        held = host.hold_port(self.job.main_port if self.job.node_rank == 0 else 0)
        port = held.getsockname()[1] if self.job.node_rank == 0 else self.job.main_port
        self.workers = []
        for process in world_table(self.job, self.nodes.procs, port, attempt):
            report = folder / f"{attempt}-{process.rank}"
            streams = self.output.open(process, attempt)
            leads = self.job.procs > 1 or not sys.stdin.isatty()  # one process alone may ask at the terminal
            if self.job.start == "fork" and self.job.target.kind != "program":
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if pid == 0:
                    self._leave(held)
                    settle(process.env, streams, leads=leads)
                    self.output.leave()
                    return report
                started = Worker(process, pid, report, leads)
            else:
                started = spawn(self.job, process, report, streams, leads=leads)
            if leads:
                self.reaper.add(started.pid)
            self.workers.append(started)
        self.output.started()
        return held

    def _leave(self, held: socket.socket) -> None:
        """In a forked process: drops what is the launcher's."""
        self.signals.leave()
        self.nodes.close()
        self.reaper.leave()
        held.close()

    def _attempt(self, attempt: int, held: socket.socket) -> Outcome:
        """Watches one attempt to its end, and ends what is left of it."""
        try:
            self._watch()
            if self.signals.ending:
                asked = self.signals.ending[0]
                stop(self.workers, asked, _INTERRUPT_S if asked == signal.SIGINT else _TERMINATE_S)
                return Outcome(128 + asked, restarts=attempt)
            failure = first_failure(self.workers, self.job.node_rank)
            if failure is not None:
                elsewhere = self.nodes.trouble if self.nodes.failed(failure.what, failure.at) else ""
                return Outcome(failure.exit_code, failure, elsewhere, attempt)
            if not self.nodes.trouble:
                self.nodes.finish(lambda: self.signals.ending)
            stop(self.workers, signal.SIGTERM, AFTER_FAILURE_S)
            value = worker.value_of(self.workers[0].report)
            return Outcome(1 if self.nodes.trouble else 0, None, self.nodes.trouble, attempt, value)
        finally:
            sweep(self.workers)
            self.output.finish()
            held.close()
            for each in self.workers:
                if each.leads:
                    self.reaper.remove(each.pid)

    def _watch(self) -> None:
        """Copies output until all processes have ended, one or another node has failed, or a signal asks to end."""
        poll = select.poll()
        ends = {number: each for each in self.workers if (number := _end_of(each.pid)) is not None}
        links = {link.connection.fileno(): link for link in self.nodes.links}
        for number in (self.signals.read, *ends, *links, *self.output.pipes):
            poll.register(number, select.POLLIN)
        # Where the system tells of each end at once, the interval is only a safety net.
        interval_s = self.job.monitor_interval_s * (10 if len(ends) == len(self.workers) else 1)
        try:
            while not self.signals.ending:
                for number, _ in poll.poll(interval_s * 1000):
                    ended = number in ends and ends[number].poll() is not None
                    if number in self.output.pipes:
                        ended = not self.output.copy(number)
                    elif number in links:
                        self.nodes.listen([links[number]])
                        ended = links[number] not in self.nodes.links
                    if ended:
                        poll.unregister(number)
                codes = [each.poll() for each in self.workers]
                if any(codes) or None not in codes or self.nodes.trouble or any(map(stuck, self.workers)):
                    return
        finally:
            for number in ends:
                os.close(number)

    def _pass_on(self, number: int) -> None:
        for each in self.workers:
            each.send(number)


def _end_of(pid: int) -> int | None:
    """A file descriptor that becomes readable when a child ends; None where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


LAUNCHER = LocalLauncher()
