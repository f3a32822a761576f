"""The environment of a pod whose script was started by nobody but the cluster: one process in each pod.

    TrainJob, `paceline launch --on kubernetes`   PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT
    PyTorchJob                                    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, which count pods; newer: PET_*
    Indexed Job, JobSet                           JOB_COMPLETION_INDEX; the rest stands in the manifest, if it does

A launcher in the pod (`paceline launch`, torchrun) reads PET_* itself, and gives its processes torchrun's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.world.detect.reading import Reading
from paceline.world.world import World

_OF_A_LAUNCHER = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_NAMES = ("PET_NNODES", "PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK", "WORLD_SIZE")
_DEFAULT_PORT = 29500


def in_pod(env: Mapping[str, str]) -> bool:
    """Whether this process runs in a pod: the kubelet gives the cluster's address to every container."""
    return "KUBERNETES_SERVICE_HOST" in env


def detect(env: Mapping[str, str]) -> World | None:
    """World of pods that run one process each; None outside of such.

    Raises:
        WorldError: `world-env`, naming each variable that is missing or contradicts another.
    """
    if any(name in env for name in _OF_A_LAUNCHER):
        return None
    read = Reading(env, "a pod (PET_*, JOB_COMPLETION_INDEX, RANK)")
    if counts_pods(env):
        nodes, node = read.number("WORLD_SIZE"), read.number("RANK")
    elif "PET_NNODES" in env and ":" not in env["PET_NNODES"]:
        nodes, node = read.number("PET_NNODES"), read.number("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    elif "JOB_COMPLETION_INDEX" in env and "WORLD_SIZE" in env:
        nodes, node = read.number("WORLD_SIZE"), read.number("JOB_COMPLETION_INDEX")
    else:
        return None  # a range of nodes needs a launcher; an index alone does not say how many pods there are
    if nodes == 1:
        return None
    if node is None and not read.problems:
        read.wrong(
            f"PET_NODE_RANK is not set, but {read.shown(*_NAMES)}.", "set it to the number of this pod, from 0 on"
        )
    address = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR")
    if address is None:
        read.wrong(
            f"MASTER_ADDR is not set, so {nodes} pods cannot find each other ({read.shown(*_NAMES)}).",
            "set MASTER_ADDR to the host name of pod 0, and MASTER_PORT to a port",
        )
    port = read.number("PET_MASTER_PORT", "MASTER_PORT") or _DEFAULT_PORT
    if nodes is None or node is None:
        read.check()
        return None  # unreachable: a missing number has been noted
    return read.world(
        World(rank=node, size=nodes, node=node, nodes=nodes, source="kubernetes", address=address, port=port)
    )


def counts_pods(env: Mapping[str, str]) -> bool:
    """Whether RANK and WORLD_SIZE are a PyTorchJob's, which count pods, and not a launcher's, which count processes."""
    if "RANK" not in env or "WORLD_SIZE" not in env or any(name in env for name in _OF_A_LAUNCHER):
        return False
    if "PET_NODE_RANK" in env:
        return env["RANK"] == env["PET_NODE_RANK"] and env["WORLD_SIZE"] == env.get("PET_NNODES", env["WORLD_SIZE"])
    # Operators before 1.7 say nothing else, but pods are called after their place in the job: the first is JOB-master-0.
    name = re.fullmatch(r"(.+)-(master|worker)-(\d+)", env.get("HOSTNAME", ""))
    if name is None or not in_pod(env) or env.get("MASTER_ADDR") not in (f"{name[1]}-master-0", "localhost"):
        return False
    number = int(name[3]) + (name[2] == "worker")
    return env["RANK"] == str(number)


DETECT = detect
