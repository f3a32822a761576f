"""Connects the driver to a Ray cluster, and reserves a placement group in it, with one bundle for each host.

Ray would wait for ever for a bundle that no node can hold. So pure functions first decide from the nodes of the cluster
whether the request can ever be met.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import LaunchError
from paceline.base.host_port import host_and_port
from paceline.base.terminal import say
from paceline.launch.job import Job
from paceline_hosts.assignment import assignment_of
from paceline_hosts.clusters.ray import RaySettings

_CONNECT_S = 5.0
_SAY_S = 5.0  # how long a command waits for room before it says so
_POLL_S = 0.5
_STEP_S = 1.0  # how long it waits for each number of hosts above the least
Bundle = Mapping[str, float]


@dataclass(frozen=True)
class Node:
    """One node of a cluster.

    Attributes:
        address: the address at which the node is reached.
        host: its host name.
        resources: all of its resources, used or not, by Ray's names.
    """

    address: str
    host: str
    resources: Mapping[str, float]

    def holds(self, bundle: Bundle) -> int:
        """Returns how many bundles of this kind the node could hold if nothing else ran on it."""
        counts = [int(self.resources.get(name, 0.0) // amount) for name, amount in bundle.items()]
        return min(counts)


def bundle_of(settings: RaySettings, procs: int, gpus: int) -> dict[str, float]:
    """Returns the resources of each host: CPUs for `procs` processes, `gpus` GPUs, and what else the settings name."""
    bundle: dict[str, float] = {"CPU": procs * settings.ray_cpus}
    if gpus:
        bundle["GPU"] = gpus
    for pair in filter(None, settings.ray_resources.split(",")):
        name, _, amount = pair.partition("=")
        bundle[name] = float(amount)
    return bundle


def gpus_of(job: Job) -> int | None:
    """Returns the GPUs of each host; None if nothing was set, so that the cluster decides whether there are any."""
    settings = assignment_of(job).settings
    if settings.run.cpu:
        return 0
    return settings.launch.gpus_per_node


def shown(bundle: Bundle) -> str:
    """A bundle as a person writes it: `CPU 4, GPU 2`."""
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())


def hosts_that_fit(nodes: Sequence[Node], bundle: Bundle, strategy: str) -> int:
    """Returns how many bundles a cluster could hold if nothing else ran in it."""
    counts = [node.holds(bundle) for node in nodes]
    if strategy == "STRICT_SPREAD":  # one on each node at most
        counts = [min(count, 1) for count in counts]
    return sum(counts)


def too_small(nodes: Sequence[Node], bundle: Bundle, strategy: str, least: int) -> LaunchError:
    """Returns the error for a cluster that could never hold what is asked for; it lists what each node has."""
    lines = [f"each of {least} host{'s' * (least > 1)} needs {shown(bundle)}; strategy {strategy}"]
    for node in nodes:
        has = {name: node.resources.get(name, 0.0) for name in bundle}
        lines.append(f"{node.host} ({node.address}) has {shown(has)}")
    fits = hosts_that_fit(nodes, bundle, strategy)
    what = "no node of the Ray cluster is large enough."
    if fits:
        what = f"the Ray cluster has room for {fits} of {least} hosts."
    fix = "ask for less with --procs, --nodes, --gpus-per-node or --ray-cpus"
    if fits and strategy == "STRICT_SPREAD":
        fix += ", or let hosts share a node with --ray-strategy pack"
    fix += "; where the cluster grows by itself, say how long to wait for it with --ray-wait-s"
    return LaunchError("ray-resources", what, lines, fix)


def connect(address: str | None) -> bool:
    """Connects this process to the cluster. Returns whether it did; False if the process was connected already.

    Args:
        address: address of the cluster's head, or "local" for a new cluster on this host that ends with this process; None
            for the value of RAY_ADDRESS, or else for a cluster that runs on this host.

    Raises:
        LaunchError: `ray-cluster`.
    """
    import ray

    if ray.is_initialized():
        return False
    given_address = address or environment.snapshot().get("RAY_ADDRESS") or ""
    source = "--ray-address" if address else "RAY_ADDRESS"
    if given_address and given_address not in ("auto", "local"):
        _knock(given_address, source)
    try:
        # Output comes through `paceline_hosts.remote`, with ranks; Ray's own way of showing it would drop repeated lines.
        ray.init(
            address=given_address or "auto",
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if given_address == "local" else None,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        text = " ".join(str(error).split())
        where = f"{source}={given_address}" if given_address else "neither --ray-address nor RAY_ADDRESS is set"
        fix = "start one (`ray start --head`), or name its head: --ray-address HOST:6379"
        if "ersion mismatch" in text:
            fix = "run the command with the same Ray and Python as the cluster"
        elif "oken" in text:
            fix = "give this command the cluster's token: RAY_AUTH_TOKEN, or the file ~/.ray/auth_token"
        raise LaunchError("ray-cluster", "no Ray cluster could be joined.", [where, text], fix) from None
    return True


def _knock(given_address: str, source: str) -> None:
    """Checks that a server listens at an address. Ray itself would try for a minute, and log each attempt."""
    # The address may be a URL (ray://HOST:PORT).
    host, port = host_and_port(given_address.rpartition("://")[2])
    fix = "see that the cluster is up (`ray status` there), and that this host reaches that port"
    if not host or not port.isdigit():
        why = f"{source}={given_address}; expected: HOST:PORT, such as 10.0.0.1:6379"
        raise LaunchError("ray-cluster", "the address of the Ray cluster cannot be read.", why, "correct it")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        why = f"{source}={given_address}: {reason}"
        raise LaunchError("ray-cluster", f"no Ray cluster answers at {given_address}.", why, fix) from None


def nodes_of_cluster() -> list[Node]:
    """Returns the nodes of the cluster that are alive."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["NodeManagerAddress"], node["NodeManagerHostname"], node["Resources"]) for node in alive]


def reserve(bundle: Bundle, settings: RaySettings, least: int, most: int, asked_to_end: Callable[[], object]) -> Any:
    """Reserves bundles for as many hosts as there is room for. Returns the placement group, or None if a signal came.

    Args:
        bundle: what each host needs.
        settings: how bundles are placed, and how long this may take.
        least, most: the fewest and the most hosts.
        asked_to_end: returns true to stop waiting.

    Raises:
        LaunchError: `ray-resources`, where the cluster is too small, or has had no room for too long.
    """
    from ray.util import remove_placement_group

    strategy = settings.ray_strategy.upper()
    nodes = nodes_of_cluster()
    fitting = min(hosts_that_fit(nodes, bundle, strategy), most)
    if fitting < least and settings.ray_wait_s is None:
        raise too_small(nodes, bundle, strategy, least)
    # Others may use a part of the cluster, so more hosts than the least are taken only if they are free at once.
    for count in range(fitting, least, -1):
        group = _placed(bundle, strategy, count)
        if group.wait(_STEP_S):
            return group
        remove_placement_group(group)
        if asked_to_end():
            return None
    # This group is not removed while it waits: it keeps its place in Ray's queue, and a cluster that grows by itself learns
    # from it what is needed.
    group = _placed(bundle, strategy, least)
    begun = time.monotonic()
    was_logged = False
    while not group.wait(_POLL_S):
        waited_s = time.monotonic() - begun
        if asked_to_end():
            remove_placement_group(group)
            return None
        if settings.ray_wait_s is not None and waited_s > settings.ray_wait_s:
            remove_placement_group(group)
            raise no_room(nodes_of_cluster(), bundle, strategy, least, settings.ray_wait_s)
        if settings.ray_wait_s is None:
            # A node may be lost meanwhile. Ray would go on waiting for one that is as large.
            nodes = nodes_of_cluster()
            if hosts_that_fit(nodes, bundle, strategy) < least:
                remove_placement_group(group)
                raise too_small(nodes, bundle, strategy, least)
        if not was_logged and waited_s > _SAY_S:
            was_logged = True
            needed = f"{least} x ({shown(bundle)})"
            say(f"waiting for room in the Ray cluster: {needed}, {strategy}")
    return group


def _placed(bundle: Bundle, strategy: str, count: int) -> Any:
    from ray.util import placement_group

    return placement_group([dict(bundle)] * count, strategy=strategy, name="paceline")


def no_room(nodes: Sequence[Node], bundle: Bundle, strategy: str, least: int, wait_s: float) -> LaunchError:
    """Returns the error for a cluster that had no room within `wait_s` seconds."""
    import ray

    if hosts_that_fit(nodes, bundle, strategy) < least:
        return too_small(nodes, bundle, strategy, least)
    available = ray.available_resources()
    free = {name: available.get(name, 0.0) for name in bundle}
    why = [f"{least} x ({shown(bundle)}), strategy {strategy}", f"free now, on all nodes together: {shown(free)}"]
    what = f"the Ray cluster had no room for {wait_s:g} s."
    return LaunchError("ray-resources", what, why, "wait longer (--ray-wait-s), or ask for less")
