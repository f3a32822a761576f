"""`World`: who am I. Frozen, pure, torch-free: found from the environment that a launcher left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.base import env as environment
from paceline.base.registry import Registry

DETECTORS = Registry("paceline.detectors", "detector")
# torchrun's names win: a launcher of ours, or torchrun under SLURM, has said precisely who we are.
ORDER = ("torchrun", "mpi", "slurm")
# A detector is loaded if one of these variables is set: without them it finds nothing. One that is not listed is always asked.
SIGNS: Mapping[str, tuple[str, ...]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpi": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
    ),
    "slurm": ("SLURM_PROCID",),
    "kubernetes": ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "PET_NNODES", "JOB_COMPLETION_INDEX"),
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """One process among all.

    Attributes:
        rank, size: number of this process, and how many there are.
        local_rank, local_size: the same on its host.
        node, nodes: number of its host, and how many there are.
        device: its device, such as "cuda:1" or "cpu"; "" until `rendezvous` has looked.
        source: what told us, such as "torchrun", "slurm" or "single".
        address, port: where rank 0 listens; None for one process.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    device: str = ""
    source: str = "single"
    address: str | None = None
    port: int | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank."""
        return self.rank == self.size - 1

    @classmethod
    def detect(cls, env: Mapping[str, str] | None = None) -> World:
        """Reads the environment of torchrun (and ours), mpirun or srun; a world of one where there is none.

        Raises:
            WorldError: `world-env`, where the environment contradicts itself (RANK without WORLD_SIZE, say).
        """
        env = environment.snapshot() if env is None else env
        names = [*ORDER, *(name for name in DETECTORS.names() if name not in ORDER)]
        for name in names:
            signs = SIGNS.get(name)
            if signs is not None and not any(sign in env for sign in signs):
                continue
            world: World | None = DETECTORS.get(name)(env)
            if world is not None:
                return world
        return cls()
