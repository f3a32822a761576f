"""Reads the variables of `mpirun`: those of Open MPI, of MPICH and Intel MPI (Hydra), and of MVAPICH."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from paceline.world.detect.reading import EnvironmentNumbers, first_port
from paceline.world.world import World

# (rank, size, local rank, local size) of each family
_FAMILIES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# These differ between two jobs on one host, and are the same for all ranks of a job.
_JOB = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
    "PMI_JOBID",
    "PMI_PORT",
    "MV2_COMM_WORLD_JOBID",
)


def detect(env: Mapping[str, str]) -> World | None:
    """Returns the world that the variables of mpirun describe; None if they are not set.

    On one host, the ranks meet at 127.0.0.1, at a port that follows from the job. mpirun does not say on which host rank 0
    runs. So on several hosts the user must pass MASTER_ADDR (`mpirun -x MASTER_ADDR=...`).

    Raises:
        WorldError: `world-env`, with each variable that is missing or contradicts another.
    """
    # A rank without a size, or a size without a rank, is an error of this family. It is no reason to try the next one.
    names = next((family for family in _FAMILIES if family[0] in env or family[1] in env), None)
    if names is None or _is_srun(env, names):
        return None
    reading = EnvironmentNumbers(env, f"mpirun ({names[0].removesuffix('RANK')}*)")
    rank, size, local_rank, local_size = (reading.number(name) for name in names)
    for name, value in zip(names[:2], (rank, size), strict=True):
        if value is None and name not in env:
            reading.add_problem(
                f"{name} is not set, but {reading.describe(*names)}.", "unset the others, or start with mpirun"
            )
    if rank is None or not size:
        if size == 0:
            reading.add_problem(f"{names[1]} is 0.", "unset it, or start with mpirun")
        reading.fail()
    local_rank = rank if local_rank is None else local_rank
    local_size = local_size or size
    address = env.get("MASTER_ADDR")
    port = reading.number("MASTER_PORT")
    if address is None and local_size >= size:
        address = "127.0.0.1"
    if address is None:
        reading.add_problem(
            f"MASTER_ADDR is not set, and {size} processes run on several hosts ({reading.describe(*names)}).",
            "mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        )
    if port is None:
        # All ranks of a job must find the same port without a message, and two jobs on one host should find different ports.
        job = next((env[name] for name in _JOB if name in env), "")
        port = first_port(zlib.crc32(job.encode()))
    return reading.checked(
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
    """Returns whether srun has set the PMI variables (`--mpi=pmi2`). Then SLURM's own variables, which say more, are used."""
    same_rank = env.get("SLURM_PROCID") == env.get("PMI_RANK")
    return names[0] == "PMI_RANK" and "SLURM_STEP_ID" in env and same_rank


DETECT = detect
