"""A Ray cluster of several nodes on this machine, in a process of its own that ends with the test process.

    with RayCluster(folder) as cluster:
        node = cluster.add(num_cpus=2)
        subprocess.run([..., "launch", "--on", "ray", ...], env=cluster.environment)
        cluster.remove(node)

Ray's own daemons are told apart by the cluster's address, and are ended by their pids; nothing else on this machine is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

OBJECT_STORE_BYTES = 80 << 20
# Token authentication is the default for what listens on more than this host.
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "OMP_NUM_THREADS": "1",
    # Ray runs its workers at the lowest priorities but four. Beside other tests they would hardly run at all.
    "RAY_worker_niceness": "0",
    # A node that is removed refuses connections and is noticed within seconds. One that is only slow keeps its place.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "30000",
    "RAY_health_check_failure_threshold": "3",
}


class RayCluster:
    """A cluster with a head that runs nothing; nodes are added and removed by number."""

    def __init__(self) -> None:
        # The paths of its sockets must be short.
        self._folder = tempfile.mkdtemp(prefix="ray-")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE", "RAY_"))}
        # Ray notes there which cluster of this host was started last: ours is not to be found by others, nor theirs by us.
        self.environment = {**clean, **SETTINGS, "RAY_TMPDIR": self._folder}
        Path(self._folder, "ray").mkdir()

    def __enter__(self) -> Self:
        self._log = Path(self._folder, "log").open("w")
        command = [sys.executable, __file__]
        self._server = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self.environment["RAY_ADDRESS"] = self._answer()["address"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate(timeout=60)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        while True:
            line = self._server.stdout.readline()
            if not line:
                raise RuntimeError(Path(self._folder, "log").read_text()[-3000:])
            if line.startswith("{"):
                return dict(json.loads(line))

    def ask(self, **request: Any) -> dict[str, Any]:
        """What the process with the cluster answers."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def add(self, **resources: Any) -> int:
        """Adds a node; returns its number. Arguments of `ray.cluster_utils.Cluster.add_node`."""
        return int(self.ask(add=resources)["node"])

    def remove(self, node: int, *, kill: bool = True) -> None:
        """Ends a node, with all its processes; as a host that fails does, where `kill` says so."""
        self.ask(remove=node, kill=kill)

    def idle(self, within_s: float = 10.0) -> dict[str, Any]:
        """Waits until nothing uses the cluster; returns what is left in it."""
        deadline = time.monotonic() + within_s
        while True:
            left = self.ask(left=True)
            if not any(left.values()) or time.monotonic() > deadline:
                return left
            time.sleep(0.2)


def serve() -> None:
    """Does what is asked for on standard input, until its end."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table

    common = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    nodes: list[Any] = []

    def answer(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    answer(address=cluster.address)
    for line in sys.stdin:
        request = json.loads(line)
        if "add" in request:
            nodes.append(cluster.add_node(**{**common, **request["add"]}))
            answer(node=len(nodes) - 1)
        elif "remove" in request:
            cluster.remove_node(nodes[request["remove"]], allow_graceful=not request["kill"])
            answer()
        else:
            used = {
                name: amount - ray.available_resources().get(name, 0.0)
                for name, amount in ray.cluster_resources().items()
                if name in ("CPU", "GPU")
            }
            groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
            actors = [actor for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"]
            answer(used={name: amount for name, amount in used.items() if amount}, groups=groups, actors=len(actors))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    serve()
