"""Several nodes that find each other through torchelastic's rendezvous: a node that was lost may come back.

torchelastic's agent decides who takes part and when all start again; the processes are started, watched and ended as on
one host (always fresh ones: the agent has threads, which a forked process would lack).

Each round of the rendezvous gets a store of its own: with a shared one, restarted processes read the addresses of dead
ones, and a node that joins waits for an address that nobody says again.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline.launch import host, worker
from paceline.launch.failure import AFTER_FAILURE_S, first_failure, stuck
from paceline.launch.launcher import Failure, Job, Outcome, Process, Rendered
from paceline.launch.local import LocalLauncher
from paceline.launch.output import Output
from paceline.launch.processes import PARCEL, Reaper, Worker, spawn, stop, sweep
from paceline.launch.report import describe
from paceline.launch.signals import Signals

_FEWEST_KEEP_ALIVES = 3  # with fewer, a node that is late forms a world of its own
_FAILED = "paceline/failed"  # torchelastic itself leaves the others to notice
_HEARD_S = 1.0
_EXIT_S = 30.0  # how long to wait at the end for nodes that still run
_OPTIONS = {"keep_alive_interval": "1", "keep_alive_max_attempt": "5", "last_call_timeout": "2", "join_timeout": "300"}


class ElasticLauncher(LocalLauncher):
    """Starts processes on this host, as one of several that torchelastic brings together."""

    name = "elastic"

    def submit(self, rendered: Rendered) -> ElasticHandle:  # type: ignore[override]
        """Checks the job; the processes run in `wait`.

        Raises:
            LaunchError: those of `host.check`, and `launch-keep-alive`.
        """
        host.check(rendered.job, port=False)  # torchelastic's store may listen on another node, or be there already
        attempts = int(rendered.job.options.get("keep_alive_max_attempt", _FEWEST_KEEP_ALIVES))
        if attempts < _FEWEST_KEEP_ALIVES:
            raise LaunchError(
                "launch-keep-alive",
                f"keep_alive_max_attempt={attempts} would let a late node form a run of its own.",
                why="--rdzv-conf",
                fix=f"say {_FEWEST_KEEP_ALIVES} or more, with a shorter keep_alive_interval",
            )
        return ElasticHandle(rendered)


class ElasticHandle:
    """A job of this node, among others."""

    def __init__(self, rendered: Rendered) -> None:
        self.job = rendered.job
        self.workers: list[Worker] = []
        self.failure: Failure | None = None
        self.attempt = 0
        self.value: Any = None
        self.reached = False  # whether the nodes have found each other once
        self.elsewhere = ""  # what ended the run on another node
        self.signals = Signals(self._pass_on)

    def wait(self) -> Outcome:
        """Runs the job to its end, restarts included.

        Raises:
            LaunchError: `launch-address`, where the rendezvous fails.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        self.reaper = Reaper(self.folder)
        if self.job.target.function is not None:
            worker.pack(self.job.target.function, str(self.folder / PARCEL))
        self.signals.enter()
        try:
            with environment.patched({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}):
                failed = self._run()
        finally:
            self.stop_all()
            self.signals.leave()
            self.reaper.close()
        if self.signals.ending:
            return Outcome(128 + self.signals.ending[0], restarts=self.attempt)
        code = self.failure.exit_code if failed and self.failure else int(failed)
        return Outcome(code, self.failure, self.elsewhere, self.attempt, self.value)

    def _pass_on(self, number: int) -> None:
        for each in self.workers:
            each.send(number)

    def _run(self) -> bool:
        """Runs torchelastic's agent; whether the job failed."""
        from torch.distributed import DistError
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

        job = self.job
        try:
            spec = WorkerSpec(
                role="rank", local_world_size=job.procs, rdzv_handler=self._rendezvous(), entrypoint=job.target.name,
                max_restarts=job.max_restarts, monitor_interval=job.monitor_interval_s,
            )  # fmt: skip
            return bool(_agent(self)(spec, exit_barrier_timeout=_EXIT_S).run().is_failed())
        except SignalException:
            return True
        except (DistError, RendezvousConnectionError) as error:
            if not self.reached:
                raise self._not_found(error) from error
            self.elsewhere = f"the node that keeps the rendezvous was lost ({type(error).__name__})"
            return True
        except RendezvousError as error:
            raise self._not_found(error) from error

    def _rendezvous(self) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        job = self.job
        options = {**_OPTIONS, **job.options}
        run_id = options.pop("run_id", "paceline")
        endpoint = f"{job.main_address}:{job.main_port}"
        try:
            return get_rendezvous_handler(
                RendezvousParameters(job.backend, endpoint, run_id, job.nodes, job.nodes, **options)
            )
        except ValueError as error:  # no such backend, an option of a wrong kind
            raise self._not_found(error) from error

    def _not_found(self, error: Exception) -> LaunchError:
        place = f"{self.job.main_address}:{self.job.main_port}"
        return LaunchError(
            "launch-address",
            f"the nodes did not find each other through {self.job.backend} at {place}.",
            why=f"{type(error).__name__}: {error}",
            fix="start the same command on all nodes, with node 0's --main-address and --main-port",
        )

    def start_all(self, processes: list[Process]) -> None:
        """Starts the processes of one round."""
        self.output = Output(self.job.log_dir, self.job.tee, self.job.mark)
        self.failure, self.workers, self.reached = None, [], True
        for process in processes:
            report = self.folder / f"{self.attempt}-{process.rank}"
            report.unlink(missing_ok=True)  # a round that new nodes began counts as the same attempt
            streams = self.output.open(process, self.attempt)
            started = spawn(self.job, process, report, streams, leads=True)
            self.reaper.add(started.pid)
            self.workers.append(started)
        self.output.started()

    def look(self) -> bool | None:
        """Whether all have ended well (True), one has failed (False), or they run (None)."""
        for read in list(self.output.pipes):
            self.output.copy(read)
        codes = [each.poll() for each in self.workers]
        if any(codes) or any(map(stuck, self.workers)):
            self.failure = first_failure(self.workers, self.job.node_rank)
            return False
        if None in codes:
            return None
        self.value = worker.value_of(self.workers[0].report)
        return True

    def stop_all(self, signum: int = signal.SIGTERM, grace_s: float = AFTER_FAILURE_S) -> None:
        """Ends the processes of this round."""
        stop(self.workers, signum, grace_s)
        sweep(self.workers)
        if self.workers:
            self.output.finish()
        for each in self.workers:
            self.reaper.remove(each.pid)
        self.workers = []


def _agent(handle: ElasticHandle) -> Any:
    """torchelastic's agent, with processes that are ours."""
    from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerState
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    class Agent(SimpleElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            job: Job = handle.job
            if handle.failure is not None:
                again = f"paceline: starting all again ({self._remaining_restarts} restarts left)"
                failed = Outcome(1, handle.failure)
                print(describe(failed, job), again, sep="\n", file=sys.stderr, flush=True)
            handle.attempt = job.max_restarts - self._remaining_restarts
            handle.start_all(
                [Process(each.global_rank, each.local_rank, self._env(each)) for each in worker_group.workers]
            )
            return {each.process.local_rank: each.pid for each in handle.workers}

        def _env(self, each: Any) -> dict[str, str]:
            group = self._worker_group
            return {
                **handle.job.env,
                "RANK": str(each.global_rank),
                "WORLD_SIZE": str(each.world_size),
                "LOCAL_RANK": str(each.local_rank),
                "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
                "GROUP_RANK": str(group.group_rank),
                "GROUP_WORLD_SIZE": str(group.group_world_size),
                "MASTER_ADDR": str(group.master_addr),
                "MASTER_PORT": str(group.master_port),
                "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_RESTART_COUNT": str(handle.attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(handle.job.max_restarts),
                "TORCHELASTIC_USE_AGENT_STORE": str(group.spec.rdzv_handler.use_agent_store),
            }

        def _monitor_workers(self, worker_group: Any) -> Any:
            if handle.signals.ending:
                asked = signal.Signals(handle.signals.ending[0])
                raise SignalException(f"asked to end by {asked.name}", asked)
            state = handle.look()
            if state is None and worker_group.store.check([_FAILED]):
                handle.elsewhere = worker_group.store.get(_FAILED).decode()
                self._remaining_restarts = 0  # that node has gone: there is nobody to begin again with
                return RunResult(WorkerState.FAILED)
            if state is None:
                return RunResult(WorkerState.HEALTHY)
            if state:
                return RunResult(
                    WorkerState.SUCCEEDED, return_values={each.global_rank: None for each in worker_group.workers}
                )
            failure = handle.failure
            if self._remaining_restarts == 0 and failure is not None:
                worker_group.store.set(_FAILED, f"node {worker_group.group_rank} ({host.name()}): {failure.what}")
                time.sleep(_HEARD_S)  # this node may be the one that keeps the store
            failures = {}
            if failure is not None:
                failures[failure.rank] = ProcessFailure(failure.local_rank, failure.pid, failure.code, os.devnull)
            return RunResult(WorkerState.FAILED, failures=failures)

        def _stop_workers(self, worker_group: Any) -> None:
            handle.stop_all()

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            handle.stop_all(death_sig, 3.0 if death_sig == signal.SIGINT else timeout)

    return Agent


LAUNCHER = ElasticLauncher()
