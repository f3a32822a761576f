"""Reads RANK, WORLD_SIZE, ...: the variables that torchrun and `paceline launch` set, or a user by hand."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.world.detect.kubernetes import counts_pods
from paceline.world.detect.reading import EnvironmentNumbers
from paceline.world.world import World

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Scripts export RANK and WORLD_SIZE from the variables of SLURM or MPI. Then those still give the local rank.
_LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
)
LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def detect(env: Mapping[str, str]) -> World | None:
    """Returns the world that the variables of torchrun describe; None if none of them is set, or WORLD_SIZE=1 alone.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are enough: without LOCAL_RANK, all processes are on one host.

    Raises:
        WorldError: `world-env`, with each variable that is missing or contradicts another.
    """
    if not any(name in env for name in _NAMES) or counts_pods(env) or _index_is_rank(env) or _is_one_alone(env):
        return None
    reading = EnvironmentNumbers(env, "torchrun (RANK, WORLD_SIZE, ...)")
    rank = reading.number("RANK")
    size = reading.number("WORLD_SIZE")
    for name in ("RANK", "WORLD_SIZE"):
        if name not in env:
            reading.add_problem(
                f"{name} is not set, but {reading.describe(*_NAMES)}.", f"set {name} too, or unset the others"
            )
    if size == 0:
        reading.add_problem("WORLD_SIZE is 0.", "set it to the number of processes, or unset it")
    if rank is None or not size:
        reading.fail()
    local_rank, local_size = _place(reading, rank, size)
    nodes = 1
    node: int | None = 0
    # One process is on one host, whatever it has inherited from a process that is one of several.
    if size > 1:
        nodes = reading.number("GROUP_WORLD_SIZE") or -(-size // local_size)
        node = reading.number("GROUP_RANK", "NODE_RANK")
    address = env.get("MASTER_ADDR")
    port = reading.number("MASTER_PORT")
    if size > 1:
        for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
            if value is None and name not in env:
                reading.add_problem(
                    f"{name} is not set, so {size} processes cannot find each other ({reading.describe(*_NAMES)}).",
                    "start the script with `paceline launch`, or set MASTER_ADDR and MASTER_PORT: where rank 0 listens",
                )
    return reading.checked(
        World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node=(rank - local_rank) // local_size if node is None else node,
            nodes=nodes,
            source="torchrun",
            address=address,
            port=port,
        )
    )


def _is_one_alone(env: Mapping[str, str]) -> bool:
    """Returns whether WORLD_SIZE=1 is all that is set, as some images and notebooks have it: that numbers no process."""
    return env.get("WORLD_SIZE") == "1" and not any(name in env for name in ("RANK", "LOCAL_RANK"))


def _index_is_rank(env: Mapping[str, str]) -> bool:
    """Returns whether WORLD_SIZE counts the pods of an Indexed Job, which `kubernetes.py` reads."""
    has_other_names = any(name in env for name in _NAMES if name != "WORLD_SIZE")
    return "JOB_COMPLETION_INDEX" in env and not has_other_names


def _place(reading: EnvironmentNumbers, rank: int, size: int) -> tuple[int, int]:
    """Returns the number of this process on its host, and the number of processes on the host."""
    local_rank = reading.number(*_LOCAL_RANK)
    local_size = reading.number(*LOCAL_SIZE)
    if local_rank is None and local_size is None:
        return rank, size
    if local_rank is None:
        local_size = max(local_size or 0, 1)
        return rank % local_size, local_size
    if local_size is None:
        if local_rank != rank:
            reading.add_problem(
                f"LOCAL_WORLD_SIZE is not set, though rank {rank} has local rank {local_rank}: several hosts.",
                "set LOCAL_WORLD_SIZE to the number of processes on this host",
            )
            return local_rank, max(local_rank + 1, 1)
        local_size = size
    if local_size == 0:
        reading.add_problem("LOCAL_WORLD_SIZE is 0.", "set it to the number of processes on this host, or unset it")
    return local_rank, max(local_size, 1)


DETECT = detect
