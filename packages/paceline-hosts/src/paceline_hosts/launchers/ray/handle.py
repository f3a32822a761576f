"""The handle of a job on a Ray cluster: it connects, reserves hosts, runs the job, and leaves nothing in the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.base.terminal import say
from paceline.launch.job import Job
from paceline.launch.launcher import Outcome
from paceline.launch.processes.signals import Signals
from paceline_hosts.assignment import assignment_of
from paceline_hosts.clusters.ray import RaySettings
from paceline_hosts.launchers.ray import cluster
from paceline_hosts.launchers.ray.hosts import Demand, RayHosts, lost_error


class RayHandle:
    """A job whose hosts are ready to begin.

    Args:
        job: the job, with its assignment.
        function: what its processes call, packed; None where they run a script.
    """

    def __init__(self, job: Job, function: bytes | None = None) -> None:
        assert isinstance(job.cluster, RaySettings), "a job of this launcher has its settings"
        self._settings = job.cluster
        self._connected = cluster.connect(job.cluster.ray_address)
        self.values: list[bytes] = []
        self._hosts: RayHosts | None = None
        try:
            self._demand = _demand(job, function)
            self._open(lambda: False)
        except BaseException:
            self._close()
            raise

    def _open(self, asked_to_end: Callable[[], object]) -> bool:
        """Reserves hosts and gets them ready. Returns False if a signal asks to end meanwhile."""
        least, most = self._demand.width
        group = cluster.reserve(self._demand.bundle, self._settings, least, most, asked_to_end)
        if group is None:
            return False
        self._hosts = RayHosts(self._demand, group)
        return self._hosts.prepare(asked_to_end)

    def wait(self) -> Outcome:
        """Runs the job to its end. If all hosts are lost at once, it starts again on other hosts while restarts are left.

        Raises:
            LaunchError: `launch-host-lost`, and those of `submit`.
        """
        signals = Signals(self._pass_on)
        signals.enter()
        restarts = self._demand.assignment.settings.launch.max_restarts
        try:
            while True:
                assert self._hosts is not None, "they are ready"
                self._hosts.begin()
                code = self._hosts.follow(signals)
                if code is not None:
                    self.values = []
                    if code == 0 and self._demand.function is not None:
                        self.values = self._hosts.values()
                    return Outcome(code)
                if restarts == 0:
                    raise lost_error(list(self._hosts.hosts.values()))
                restarts -= 1
                say(f"all hosts were lost: starting all processes again ({restarts} restarts are left)")
                self._hosts.close()
                self._hosts = None
                self._demand = self._demand.with_restarts(restarts)
                if not self._open(lambda: signals.ending):
                    return Outcome(128 + signals.ending[0])
        finally:
            signals.leave()
            self._close()

    def _pass_on(self, number: int) -> None:
        # This runs in a signal handler, where Ray must not be called. `RayHosts.follow` passes the signal on.
        if self._hosts is not None:
            self._hosts.signals.append(number)

    def _close(self) -> None:
        """Ends the hosts, and the connection to the cluster if this handle has made it."""
        import ray

        if self._hosts is not None:
            self._hosts.close()
            self._hosts = None
        if self._connected:
            ray.shutdown()
            self._connected = False


def _demand(job: Job, function: bytes | None) -> Demand:
    """Returns what to ask of the cluster, to which this process must be connected."""
    import ray

    settings = job.cluster
    assert isinstance(settings, RaySettings), "a job of this launcher has its settings"
    gpus = cluster.gpus_of(job)
    if gpus is None:
        has_any = any(node.resources.get("GPU") for node in cluster.nodes_of_cluster())
        gpus = job.procs if has_any else 0
    assignment = assignment_of(job)
    env = dict(assignment.env)
    if assignment.settings.launch.threads is None:
        env.setdefault("OMP_NUM_THREADS", str(settings.ray_cpus))
    assignment = replace(assignment, env=env, own_devices=True)
    # If Ray has copied the working directory, the copy has another path on each node.
    copied = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    bundle = cluster.bundle_of(settings, job.procs, gpus)
    return Demand(assignment, bundle, job.main_port, job.reach.timeout_s, function, follows_cwd=copied)
