"""Reads the variables of a Kubernetes pod that starts the script itself, without a launcher: one process in each pod.

    TrainJob, `paceline launch --on kubernetes`   PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
    PyTorchJob                                    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which count pods; newer: PET_*
    Indexed Job, JobSet                           JOB_COMPLETION_INDEX; the user may set the others in the manifest

A launcher in the pod (`paceline launch` or torchrun) reads PET_* itself, and sets the variables of torchrun for its processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.world.detect.reading import EnvironmentNumbers
from paceline.world.world import World

_OF_A_LAUNCHER = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_NAMES = ("PET_NNODES", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK", "WORLD_SIZE")
_DEFAULT_PORT = 29500


def in_pod(env: Mapping[str, str]) -> bool:
    """Returns whether this process runs in a pod. The kubelet sets the variable in every container."""
    return "KUBERNETES_SERVICE_HOST" in env


def detect(env: Mapping[str, str]) -> World | None:
    """Returns the world of pods that run one process each; None if this process is not in such a pod.

    Raises:
        WorldError: `world-env`, with each variable that is missing or contradicts another.
    """
    if any(name in env for name in _OF_A_LAUNCHER):
        return None
    reading = EnvironmentNumbers(env, "a pod (PET_*, JOB_COMPLETION_INDEX, RANK)")
    if counts_pods(env):
        nodes = reading.number("WORLD_SIZE")
        node = reading.number("RANK")
    elif "PET_NNODES" in env and ":" not in env["PET_NNODES"]:
        nodes = reading.number("PET_NNODES")
        node = reading.number("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    elif "JOB_COMPLETION_INDEX" in env and "WORLD_SIZE" in env:
        nodes = reading.number("WORLD_SIZE")
        node = reading.number("JOB_COMPLETION_INDEX")
    else:
        # A range of nodes needs a launcher, and an index alone does not say how many pods there are.
        return None
    if nodes == 1:
        return None
    if node is None and not reading.problems:
        reading.add_problem(
            f"PET_NODE_RANK is not set, but {reading.describe(*_NAMES)}.", "set it to the number of this pod, from 0 on"
        )
    address = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    if address is None:
        reading.add_problem(
            f"MASTER_ADDR is not set, so {nodes} pods cannot find each other ({reading.describe(*_NAMES)}).",
            "set MASTER_ADDR to the host name of pod 0, and MASTER_PORT to a port",
        )
    port = reading.number("PET_MASTER_PORT", "MASTER_PORT") or _DEFAULT_PORT
    if nodes is None or node is None:
        reading.fail()
    return reading.checked(
        World(rank=node, size=nodes, node=node, nodes=nodes, source="kubernetes", address=address, port=port)
    )


def counts_pods(env: Mapping[str, str]) -> bool:
    """Returns whether RANK and WORLD_SIZE come from a PyTorchJob and count pods; those of a launcher count processes."""
    if "RANK" not in env or "WORLD_SIZE" not in env or any(name in env for name in _OF_A_LAUNCHER):
        return False
    if "PET_NODE_RANK" in env:
        same_size = env["WORLD_SIZE"] == env.get("PET_NNODES", env["WORLD_SIZE"])
        return env["RANK"] == env["PET_NODE_RANK"] and same_size
    # Operators before 1.7 set no PET_*. But the name of a pod is its place in the job: JOB-master-0, JOB-worker-0, ...
    pod_name = re.fullmatch(r"(?P<job>.+)-(?P<type>master|worker)-(?P<index>\d+)", env.get("HOSTNAME", ""))
    if pod_name is None or not in_pod(env):
        return False
    if env.get("MASTER_ADDR") not in (f"{pod_name['job']}-master-0", "localhost"):
        return False
    index = int(pod_name["index"])
    rank = index + 1 if pod_name["type"] == "worker" else index
    return env["RANK"] == str(rank)


DETECT = detect
