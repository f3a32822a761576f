"""The environment of `mpirun`: Open MPI, MPICH and Intel MPI (Hydra), MVAPICH."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from paceline.world.detect.reading import Reading, first_port
from paceline.world.world import World

# (rank, size, local rank, local size) of each family
_FAMILIES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# What differs between two jobs of one host and is the same for all ranks of a job.
_JOB = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "PMI_JOBID",
    "PMI_PORT",
    "MV2_COMM_WORLD_JOBID",
)


def detect(env: Mapping[str, str]) -> World | None:
    """World that mpirun's names describe; None where there are none.

    On one host the ranks meet at 127.0.0.1, at a port that follows from the job. mpirun does not tell where rank 0
    runs, so on several hosts MASTER_ADDR must be passed along (`mpirun -x MASTER_ADDR=...`).

    Raises:
        WorldError: `world-env`, naming each variable that is missing or contradicts another.
    """
    # By rank or size: that one of them is missing is an error, and no reason to look further.
    names = next((family for family in _FAMILIES if family[0] in env or family[1] in env), None)
    if names is None or _is_srun(env, names):
        return None
    read = Reading(env, f"mpirun ({names[0].removesuffix('RANK')}*)")
    rank, size, local_rank, local_size = (read.number(name) for name in names)
    for name, value in zip(names[:2], (rank, size), strict=True):
        if value is None and name not in env:
            read.wrong(f"{name} is not set, but {read.shown(*names)}.", "unset the others, or start with mpirun")
    if rank is None or not size:
        if size == 0:
            read.wrong(f"{names[1]} is 0.", "unset it, or start with mpirun")
        read.check()
        return None  # unreachable: a missing number has been noted
    local_rank = rank if local_rank is None else local_rank
    local_size = local_size or size
    address, port = env.get("MASTER_ADDR"), read.number("MASTER_PORT")
    if address is None and local_size >= size:
        address = "127.0.0.1"
    if address is None:
        read.wrong(
            f"MASTER_ADDR is not set, and {size} processes run on several hosts ({read.shown(*names)}).",
            "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        )
    if port is None:
        # Every rank must come to the same port by itself, and two jobs of one host to different ones: so it follows from
        # what mpirun tells all ranks of a job alike.
        job = next((env[name] for name in _JOB if name in env), "")
        port = first_port(zlib.crc32(job.encode()))
    return read.world(
        World(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node=(rank - local_rank) // local_size,
            nodes=-(-size // local_size),
            source="mpi",
            address=address,
            port=port,
        )
    )


def _is_srun(env: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Whether srun gave the PMI names (`--mpi=pmi2`): SLURM's own ones say more."""
    return names[0] == "PMI_RANK" and "SLURM_STEP_ID" in env and env.get("SLURM_PROCID") == env.get("PMI_RANK")


DETECT = detect
