"""RANK, WORLD_SIZE, ...: the names of torchrun, of `paceline launch`, and of whoever sets them by hand."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.world.detect.kubernetes import counts_pods
from paceline.world.detect.reading import Reading
from paceline.world.world import World

_WHO = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Where RANK and WORLD_SIZE were exported from SLURM's or MPI's numbers, theirs still say who we are on the host.
_LOCAL_RANK = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
)
LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLDLOCAL_SIZE", "MV2_COMM_WORLDLOCAL_SIZE", "MPI_LOCALNRANKS")


def detect(env: Mapping[str, str]) -> World | None:
    """World that torchrun's names describe; None where none of them is set.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are enough: without LOCAL_RANK all processes are taken to be on
    one host.

    Raises:
        WorldError: `world-env`, naming each variable that is missing or contradicts another.
    """
    if not any(name in env for name in _WHO) or counts_pods(env) or _index_is_rank(env):
        return None
    read = Reading(env, "torchrun (RANK, WORLD_SIZE, ...)")
    rank, size = read.number("RANK"), read.number("WORLD_SIZE")
    for name in ("RANK", "WORLD_SIZE"):
        if name not in env:
            read.wrong(f"{name} is not set, but {read.shown(*_WHO)}.", f"set {name} too, or unset the others")
    if size == 0:
        read.wrong("WORLD_SIZE is 0.", "set it to the number of processes, or unset it")
    if rank is None or not size:
        read.check()
        return None  # unreachable: a missing number has been noted
    local_rank, local_size = _place(read, rank, size)
    nodes = read.number("GROUP_WORLD_SIZE") or -(-size // local_size)
    node = read.number("GROUP_RANK", "NODE_RANK")
    address, port = env.get("MASTER_ADDR"), read.number("MASTER_PORT")
    if size > 1:
        for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
            if value is None and name not in env:
                read.wrong(
                    f"{name} is not set, so {size} processes cannot find each other ({read.shown(*_WHO)}).",
                    "start the script with `paceline launch`, or set MASTER_ADDR and MASTER_PORT: where rank 0 listens",
                )
    return read.world(
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


def _index_is_rank(env: Mapping[str, str]) -> bool:
    """Whether a manifest says WORLD_SIZE for pods that an Indexed Job numbers (`kubernetes.py`)."""
    return "JOB_COMPLETION_INDEX" in env and not any(name in env for name in _WHO if name != "WORLD_SIZE")


def _place(read: Reading, rank: int, size: int) -> tuple[int, int]:
    """This process's number on its host, and how many the host runs."""
    local_rank, local_size = read.number(*_LOCAL_RANK), read.number(*LOCAL_SIZE)
    if local_rank is None:
        return (rank, size) if local_size is None else (rank % max(local_size, 1), max(local_size, 1))
    if local_size is None:
        if local_rank != rank:
            read.wrong(
                f"LOCAL_WORLD_SIZE is not set, though rank {rank} has local rank {local_rank}: several hosts.",
                "set LOCAL_WORLD_SIZE to the number of processes on this host",
            )
            return local_rank, max(local_rank + 1, 1)
        local_size = size
    if local_size == 0:
        read.wrong("LOCAL_WORLD_SIZE is 0.", "set it to the number of processes on this host, or unset it")
    return local_rank, max(local_size, 1)


DETECT = detect
