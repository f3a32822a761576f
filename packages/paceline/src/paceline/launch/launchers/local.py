"""The launcher of the processes of this host: it starts, watches and stops them, and starts them again after a failure.

    wait:  import torch (fork) -> for each round [wait for the members -> start -> watch -> stop -> report] -> Outcome

`Nodes` (`launch/nodes.py`) decides who takes part and whether another round follows, on one host as on several.

With "fork" the processes are copies of a parent that has imported torch, so it is imported once and not once for each rank.
(The only process of a script imports torch itself.) The parent starts no thread and uses no device, because a fork copies
neither. A forked process runs the script and then *returns* from `wait`, up the stack of the caller, so that Python ends there
as it always does. One whose script failed ends at once (`worker.leave_after_failure`).
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.base.errors import LaunchError
from paceline.base.exits import PREEMPTED, STOPPED, STUCK
from paceline.base.host_port import host_and_port
from paceline.base.lazy import fast_imports
from paceline.base.temporary import temporary_folder
from paceline.base.terminal import say
from paceline.launch import host
from paceline.launch.failure_report import begun, describe
from paceline.launch.job import Job
from paceline.launch.launcher import Failure, Hosts, Outcome, Process, Rendered
from paceline.launch.nodes import need_part, nodes_of
from paceline.launch.processes import core_files
from paceline.launch.processes.failure import AFTER_FAILURE_S, end_frozen, first_failure, stuck
from paceline.launch.processes.output import Output
from paceline.launch.processes.signals import Signals
from paceline.launch.processes.spawn import (
    FUNCTION_FILE,
    Reaper,
    Worker,
    enter_forked_worker,
    kill_groups,
    request_end,
    spawn,
    stop,
)
from paceline.launch.processes.standstill import standstill_watch
from paceline.launch.recordings import recording_of
from paceline.launch.rounds import End, Report, Round
from paceline.launch.script_libraries import needed_by, script_libraries
from paceline.launch.worker import pickling, worker

_HEARTBEAT_INTERVAL_S = 0.2
# After Ctrl-C most scripts end at once. A script that still runs after this time is saving a checkpoint, or hangs.
_INTERRUPT_S = 3.0


class LocalLauncher:
    """Starts processes on this host."""

    name = "local"
    hosts: Hosts = "this"

    def available(self) -> str:
        """Always "": it needs nothing but this host."""
        return ""

    def render(self, job: Job) -> Rendered:
        """The processes of this node, with the variables of torchrun. Port 0 stands for a free port, found at the start."""
        address, port = host_and_port(job.main_address.split(",")[0])
        store = address, int(port or job.main_port)
        table = world_table(job, [job.procs] * job.nodes, job.node_rank, store, 0)
        return Rendered(job, job.target.command, table)

    def submit(self, rendered: Rendered) -> LocalHandle:
        """Checks the job, and starts nothing: the processes start, run and end in `wait`.

        Raises:
            LaunchError: those of `host.check`.
            ConfigError: `part-missing`, for several nodes without the extra hosts.
        """
        need_part(rendered.job)
        host.check(rendered.job)
        return LocalHandle(rendered)


def world_table(
    job: Job, procs: Sequence[int], node: int, store: tuple[str, int], restarts: int, run: str = ""
) -> tuple[Process, ...]:
    """Returns the processes of this node.

    Args:
        job: the job.
        procs: how many processes each node has.
        node: the number of this node.
        store: the address and port where rank 0 listens.
        restarts: how many restarts there were.
        run: a unique name of the run; "" before it has begun.
    """
    # Ranks are numbered node by node, and nodes may have different numbers of processes.
    first_rank = sum(procs[:node])
    size = sum(procs)
    # A node number that is too high is reported later, by `host.check`.
    local_size = procs[node] if node < len(procs) else job.procs
    share = len(job.cores) // max(local_size, 1)
    expected_by_script: dict[str, str] = {}
    for library in script_libraries(job.compat.split(",")):
        expected_by_script |= library.variables(local_size, node, len(procs))
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(procs)),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RUN_ID": job.options.get("run_id", "paceline"),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 holds the store: a new one for each round
    }
    if run:
        common["PACELINE_RUN"] = run
    table = []
    for local_rank in range(local_size):
        rank = first_rank + local_rank
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        own_cores = job.cores[local_rank * share : (local_rank + 1) * share]
        # Later entries win: what the user has set for the job cannot replace the numbers of a rank.
        env = {**job.env, **own, **common, **expected_by_script}
        table.append(Process(rank, local_rank, env, own_cores))
    return tuple(table)


class LocalHandle:
    """A job of this host."""

    def __init__(self, rendered: Rendered) -> None:
        self.job = rendered.job
        self.workers: list[Worker] = []
        self.round: Round | None = None
        self.failure: Failure | None = None  # of the last round, on this node
        self.report = Report("new")
        self.output = Output(self.job.log_dir, self.job.tee, self.job.mark, self.job.ranks)
        self.signals = Signals(self._pass_on)
        self._launcher_pid = os.getpid()
        # In a forked process: whether other processes of this host write to the same standard error.
        self._shared = False

    def wait(self) -> Outcome:
        """Runs the job to its end, including restarts.

        This also returns in a forked process, with `in_worker` set, at the end of the script.

        Raises:
            LaunchError: those of `nodes_of`; `launch-address`, where the nodes do not find each other; `launch-nodes`,
                where they were told different things; `launch-cut-off`, where too few are left to go on.
        """
        place = temporary_folder()
        self.recording = recording_of(self.job)
        self.nodes = nodes_of(self.job)
        if self.job.core_files:
            obstacle = core_files.allow()
            if obstacle:
                say(obstacle)
        folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=place))
        self.reaper = Reaper(folder)
        self.signals.enter()
        if self.job.start == "fork":
            is_function = self.job.target.function is not None
            if self._starts_several:
                with self.signals.interruptible():
                    import_for_scripts(needed_by(self.job, forked=True), freeze=not is_function)
            if not is_function:
                gc.freeze()  # so that no garbage collection touches, and thereby copies, memory that the processes share
        elif self.job.target.function is not None:
            (folder / FUNCTION_FILE).write_bytes(pickling.pack(self.job.target.function))
        self.stuck = standstill_watch(self.job, folder, self.nodes.pause, self.recording, self.nodes.stacks)
        self.recording.begin()
        try:
            self.nodes.processes_ended(Report("new"))
            while True:
                decided = self.nodes.next(lambda: self.signals.ending or self.stuck.leaves)
                if decided is None:
                    break
                self._announce(decided)
                self._record(decided)
                self.round = decided
                self.failure = None
                self.stuck.begin()
                report = self._start(folder)
                if report is not None:
                    # This is a forked process. It runs the script here, inside the call of `wait`.
                    return Outcome(self._work(str(report)), in_worker=True)
                self.report = self._attempt()
                self.nodes.processes_ended(self.report)
            outcome = self._outcome(self.nodes.end)
            if outcome.reason:
                self.recording.failed(outcome)
            # The recording keeps the first end that it is given; the one in `finally` is for an unexpected exception.
            self.recording.end(outcome.exit_code, outcome.reason)
            return outcome
        except LaunchError as error:
            self.recording.refused(error)
            raise
        finally:
            if os.getpid() == self._launcher_pid:  # not in a forked process
                self.recording.end(1, "the launcher failed")
                self.signals.leave()
                self.nodes.close()
                self.recording.close()
                self.reaper.close()

    def _announce(self, decided: Round) -> None:
        """Prints what has failed, if anything has, and that all processes start again."""
        lines = []
        # A round also begins when nodes join; that is no restart, and there is no failure to print.
        if decided.restarts > self._restarts:
            failed = self._failed(decided.reason)
            self.recording.failed(failed)
            lines.append(describe(failed, self.job))
            lines.append(
                f"paceline: starting all processes again (restart {decided.restarts} of {self.job.max_restarts})"
            )
        if self.nodes.several:
            lines.append(begun(decided))
        if lines:
            print(*lines, sep="\n", file=sys.stderr, flush=True)

    def _record(self, decided: Round) -> None:
        """Records that a round begins, and sets the variables that tell the processes where to record."""
        self.recording.round(decided, self.nodes.index_in(decided), leads=self.nodes.leads)
        if self.recording.folder is not None:
            self.nodes.record_into(self.recording.folder)
        self.job = replace(self.job, env={**self.job.env, **self.recording.env})

    @property
    def _restarts(self) -> int:
        return self.round.restarts if self.round is not None else 0

    def _failed(self, why: str) -> Outcome:
        """Returns the outcome of a round that failed, on this node or on another one, which `why` names."""
        # The leader says why the round has ended. If that is not the failure of this node, this one is a consequence of it.
        failed_here = self.failure is not None and (not self.nodes.several or self.failure.what in why)
        code = self.failure.exit_code if self.failure is not None else 1
        if failed_here:
            return Outcome(code, self.failure, "", self._restarts)
        elsewhere = why if self.nodes.several else self.report.what
        return Outcome(code, self.failure, elsewhere, self._restarts)

    def _outcome(self, end: End | None) -> Outcome:
        """Returns the outcome of the job.

        Raises:
            LaunchError: as `wait`.
        """
        if end is None:
            # The run has not ended for all nodes: only this launcher ends.
            if self.signals.ending:
                return self._outcome_of_signal(self.signals.ending[0])
            return Outcome(STUCK, self.failure, restarts=self._restarts)
        if end.error is not None:
            raise LaunchError.of([end.error])
        if end.code == 0:
            value = pickling.value_of(self.workers[0].report)
            return Outcome(0, restarts=self._restarts, value=value)
        if end.code == PREEMPTED:
            say(end.why)
            return Outcome(PREEMPTED, restarts=self._restarts)
        return self._failed(end.why)

    def _outcome_of_signal(self, asked: int) -> Outcome:
        """Returns the outcome of a run that a signal has ended.

        A scheduler starts a run again if it ended with `PREEMPTED`. A user who types Ctrl-C does not want that.
        """
        saved = self.report.kind == "preempted"
        if saved:
            say("all processes have saved and ended, as they were asked to")
        late_ranks = []
        for child in self.workers:
            if child.stopped and child.code == -signal.SIGKILL:
                late_ranks.append(str(child.process.rank))
        if late_ranks and asked in (signal.SIGTERM, signal.SIGINT):
            plural = "s" if len(late_ranks) > 1 else ""
            ranks = f"rank{plural} {', '.join(late_ranks)}"
            why = "a second signal" if self._asked_again() else f"{self.job.grace_s:g} s (--grace-s)"
            say(f"{ranks} had not ended after {why}: killed, without a save")
        code = 128 + asked
        if saved and asked != signal.SIGINT:
            code = PREEMPTED
        return Outcome(code, restarts=self._restarts)

    @property
    def _starts_several(self) -> bool:
        """Whether more than one process may be forked, at the same time or after a failure.

        The only process of a script imports torch itself: pages that the launcher has imported would be copied when they are
        used (10,000 pages, 0.05 s).
        """
        is_repeated = self.job.nodes > 1 or self.job.max_restarts > 0 or self.job.target.function is not None
        return self.job.procs > 1 or is_repeated

    def _work(self, report: str) -> int:
        """In a forked process: runs the target. One of a function, and one that failed, does not return from here."""
        if self.job.target.function is None:
            # Several processes find these imports in the launcher, from which they were forked.
            before = None
            if not self._starts_several:
                before = partial(import_for_scripts, needed_by(self.job, forked=False), freeze=True)
            code = worker.run(self.job.target, report, self.job.compat, shared=self._shared, before=before)
            if code:
                worker.leave_after_failure(code)
            return code
        code = 1
        try:
            code = worker.call(self.job.target.function, report)
        finally:
            worker.leave(code)

    def _start(self, folder: Path) -> Path | None:
        """Starts all processes of a round. Returns None; in a forked process, the file for its report."""
        assert self.round is not None, "a round has begun"
        decided = self.round
        # Rank 0 holds the store.
        store = self.nodes.address_of_rank_0(decided), decided.store_port
        node = self.nodes.index_in(decided)
        self.workers = []
        run = f"{self.job.options.get('run_id', 'paceline')}@{decided.founded_at!r}"
        procs = [member.procs for member in decided.members]
        for process in world_table(self.job, procs, node, store, decided.restarts, run):
            report = folder / f"{decided.number}-{process.rank}"
            streams = self.output.open(process, decided.number - 1)
            # A single process may read from the terminal, which only works in the process group of the launcher.
            leads = self.job.procs > 1 or not sys.stdin.isatty()
            shares_output = self.job.procs > 1 or bool(streams)
            if self.job.start == "fork" and self.job.target.kind != "program":
                # Each copy would write what is still in a buffer.
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if pid == 0:
                    # The copy must not act as a second launcher.
                    self._leave()
                    enter_forked_worker(
                        process, report, streams, self._launcher_pid, leads=leads, shares_output=shares_output
                    )
                    self.output.leave()
                    self.job = replace(self.job, target=self.job.target.on(process.local_rank))
                    self._shared = self._is_shared(process)
                    return report
                started = Worker(process, pid, report, leads)
            else:
                shared = self._is_shared(process)
                started = spawn(
                    self.job, process, report, streams, leads=leads, shared=shared, shares_output=shares_output
                )
            if leads:
                self.reaper.add(started.pid)
            self.workers.append(started)
        self.output.started()
        return None

    def _is_shared(self, process: Process) -> bool:
        return self.job.procs > 1 and self.output.is_shared(process)

    def _leave(self) -> None:
        """In a forked process: closes what belongs to the launcher."""
        self.signals.leave()
        self.nodes.leave_in_child()
        self.reaper.leave()

    def _attempt(self) -> Report:
        """Watches one round to its end, and stops all processes that are left."""
        assert self.round is not None, "a round has begun"
        pause = self.nodes.pause
        # Several of these conditions may hold at once. A signal to the launcher comes first: how the processes end after it
        # is no failure.
        try:
            self._watch()
            if self.signals.ending:
                return self._asked_to_end()
            if self.stuck.failure is not None:
                return self._end_stuck(self.stuck.failure)
            if self.nodes.stop_request is not None:
                how, _ = self.nodes.stop_request
                grace_s = self.job.grace_s if how == "save" else AFTER_FAILURE_S
                stop(self.workers, signal.SIGTERM, grace_s, pause, lambda: self._hurry(how))
                return self._report()
            core_s = core_files.WRITE_S if self.job.core_files else 0.0
            self.failure = first_failure(self.workers, self.nodes.index_in(self.round), pause, core_s)
            if self.failure is not None and self.job.core_files:
                self.failure = core_files.with_backtrace(self.failure, self.job.target, pause)
            if self.failure is not None:
                again = self.failure.code != STOPPED
                return Report("failed", self.failure.what, self.failure.at, again=again)
            stop(self.workers, signal.SIGTERM, AFTER_FAILURE_S, pause)
            return self._report()
        finally:
            # Output is finished last, because a process that still runs could write more.
            kill_groups(self.workers, pause)
            self.output.finish()
            for child in self.workers:
                if child.leads:
                    self.reaper.remove(child.pid)

    def _end_stuck(self, failure: Failure) -> Report:
        """Ends a run in which no rank makes progress: as a failure, or as the end of this launcher (`--on-hang leave`)."""
        self.failure = failure
        if self.stuck.leaves:
            self.nodes.leave("end", f"ended a run that was stuck (--on-hang leave): {failure.stuck}")
        stop(self.workers, signal.SIGTERM, AFTER_FAILURE_S, self.nodes.pause)
        if self.stuck.leaves:
            return self._report()
        return Report("failed", failure.what, failure.at)

    def _asked_to_end(self) -> Report:
        """A signal asks to end: passes it on, and waits until the processes have saved. A second signal ends the wait."""
        asked = self.signals.ending[0]
        self.nodes.leave("save", f"was asked to end by {signal.Signals(asked).name}")
        if asked == signal.SIGINT:
            if request_end(self.workers, asked, _INTERRUPT_S, self.nodes.pause, self._asked_again):
                return self._report()
            if not self._asked_again():
                say(f"processes have {self.job.grace_s:g} s to save (--grace-s); Ctrl-C again ends them at once")
            # This does not disturb a process that saves, but ends one that ignores Ctrl-C or hangs outside of Python.
            asked = signal.SIGTERM
        stop(self.workers, asked, self.job.grace_s, self.nodes.pause, self._asked_again)
        return self._report()

    def _asked_again(self) -> bool:
        return len(self.signals.ending) > 1

    def _hurry(self, how: str) -> bool:
        """Returns whether processes that may save must end at once: another node was lost, or a second signal has arrived."""
        halt = self.nodes.stop_request
        return len(self.signals.ending) > 1 or (how == "save" and halt is not None and halt[0] == "end")

    def _report(self) -> Report:
        """How the processes ended, if none of them has failed."""
        codes = {child.code for child in self.workers}
        if codes == {0}:
            return Report("done")
        if PREEMPTED in codes and codes <= {0, PREEMPTED}:
            return Report("preempted")
        if PREEMPTED in codes and self.nodes.stop_request is None and not self.signals.ending:
            return Report(
                "failed", f"some processes did not leave within {self.job.grace_s:g} s after others had saved"
            )
        return Report("stopped")

    def _watch(self) -> None:
        """Copies output until all processes have ended, one or another node has failed, or a signal asks to end."""
        poll = select.poll()
        ends: dict[int, Worker] = {}  # workers by the file descriptor that becomes readable at their end
        for child in self.workers:
            descriptor = _end_of(child.pid)
            if descriptor is not None:
                ends[descriptor] = child
        others = self.nodes.fileno()
        for number in (self.signals.read, *ends, *self.output.pipes):
            poll.register(number, select.POLLIN)
        if others is not None:
            poll.register(others, select.POLLIN)
        interval_s = self.job.monitor_interval_s
        if len(ends) == len(self.workers):
            interval_s *= 10  # the kernel reports each end at once, so the interval is only a fallback
        if self.nodes.several:
            interval_s = min(interval_s, _HEARTBEAT_INTERVAL_S)
        try:
            while not self.signals.ending:
                for number, _ in poll.poll(interval_s * 1000):
                    ended = number in ends and ends[number].poll() is not None
                    if number in self.output.pipes:
                        ended = not self.output.copy(number)
                    if ended:
                        # It stays readable after the end, and each call of `poll` would return at once.
                        poll.unregister(number)
                self.nodes.poll()
                self.recording.poll()
                end_frozen(self.workers, self.job.timeout_s)
                if self.stuck.look(self.workers, self.signals):
                    return
                # None is the code of a process that runs. A process that has saved and ended (PREEMPTED) has not failed.
                codes = {child.poll() for child in self.workers}
                have_ended = None not in codes
                failed = bool(codes - {None, 0, PREEMPTED}) or any(map(stuck, self.workers))
                asked = self.nodes.stop_request is not None
                if have_ended or failed or asked or self._left_behind():
                    return
        finally:
            for number in ends:
                os.close(number)

    def _left_behind(self) -> bool:
        """Returns whether some processes have saved and ended, and others did not do so within the grace period."""
        saved_at = [child.ended for child in self.workers if child.code == PREEMPTED]
        return bool(saved_at) and time.monotonic() - min(saved_at) > self.job.grace_s

    def _pass_on(self, number: int) -> None:
        for child in self.workers:
            child.send(number)


def import_for_scripts(modules: Iterable[str], *, freeze: bool = False) -> None:
    """Imports torch and what scripts need besides, with the garbage collection off.

    Args:
        modules: names of modules.
        freeze: whether later garbage collections skip all objects that exist after the imports.
    """
    with fast_imports():
        for name in ("torch", *modules):
            importlib.import_module(name)
        if freeze:
            # Before garbage collection is on again, because the first one would visit all new objects (0.16 s).
            gc.freeze()


def _end_of(pid: int) -> int | None:
    """A file descriptor that becomes readable when a child ends; None where the system does not have it."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


LAUNCHER = LocalLauncher()
