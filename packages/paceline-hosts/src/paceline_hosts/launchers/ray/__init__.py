"""The launcher for a Ray cluster. Ray chooses the hosts; an actor on each host carries the connection to its launcher.

    driver     connect -> placement group (`cluster.py`) -> actors -> messages to the agents (`hosts.py`)
    each node  actor (`node.py`) -> agent (`remote/agent.py`) -> the launcher of this host -> ranks

Restarts, failures, logs, membership and resuming work as with every other launcher. Ray reserves CPUs and GPUs for the run, and
reports when a node is lost. `paceline_hosts.ray.run` calls a function instead of a script, from a driver or a notebook.
"""

from __future__ import annotations

import importlib.util
import shlex

from paceline.base.errors import ConfigError
from paceline.launch.job import Job
from paceline.launch.launcher import Hosts, Rendered
from paceline_hosts.assignment import assignment_of
from paceline_hosts.clusters.ray import RaySettings
from paceline_hosts.launchers.ray import cluster
from paceline_hosts.launchers.ray.handle import RayHandle


class RayLauncher:
    """Starts a job on nodes of a Ray cluster."""

    name = "ray"
    hosts: Hosts = "chosen"

    def available(self) -> str:
        """What is missing on this host."""
        spec = importlib.util.find_spec("ray")
        # A folder of that name, without a module in it, is found too.
        return "" if spec is not None and spec.origin else "Ray is not installed for this Python (`pip install ray`)"

    def render(self, job: Job) -> Rendered:
        """Returns the placement group, and the ranks that its bundles hold."""
        settings = job.cluster
        assert isinstance(settings, RaySettings), "a job of this launcher has its settings"
        gpus = cluster.gpus_of(job)
        bundle = cluster.bundle_of(settings, job.procs, gpus or 0)
        more = ", and a GPU for each process if the cluster has any" if gpus is None else ""
        count = f"{job.least} to {job.nodes}" if job.least else str(job.nodes)
        lines = [
            f"command: {shlex.join(job.target.command)}",
            "",
            f"placement group: {count} x ({cluster.shown(bundle)}{more}), {settings.ray_strategy.upper()}",
            f"variables that go along: {', '.join(assignment_of(job).env) or 'none'}",
            "",
            "rank  local rank  node",
        ]
        for rank in range(job.nodes * job.procs):
            node, local_rank = divmod(rank, job.procs)
            lines.append(f"{rank:>4}  {local_rank:>10}  {node:>4}")
        return Rendered(job, job.target.command, document="\n".join(lines))

    def submit(self, rendered: Rendered) -> RayHandle:
        """Joins the cluster, takes the room that is needed, and has each host look at what it would run.

        Raises:
            LaunchError: `ray-cluster`, `ray-resources`, `launch-hosts`.
        """
        launch = assignment_of(rendered.job).settings.launch
        if launch.wait is False:
            why = "Ray ends all that a command has begun when that command ends"
            fix = "leave it out; `ray job submit --no-wait -- paceline launch --on ray ...` has Ray keep the command itself"
            raise ConfigError("host-flags", "a job of the launcher ray cannot be left alone (--no-wait).", why, fix)
        return RayHandle(rendered.job)


LAUNCHER = RayLauncher()
