"""Axis sizes <-> coordinates of a rank: pure arithmetic, so that topology is tested with no processes.

Ranks are numbered row by row with `pp` outermost and `tp` innermost: neighbours in `tp`, which talk most, are
neighbours in rank, and so on one host. `torch.distributed.DeviceMesh` numbers the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

AXES: tuple[str, ...] = ("pp", "replicate", "shard", "cp", "tp")
DATA_AXES: tuple[str, ...] = ("replicate", "shard")  # ranks along these read different samples

GRADIENT_AXES: tuple[str, ...] = ("replicate", "shard", "cp")  # over these gradients are averaged


@dataclass(frozen=True)
class Layout:
    """How many ranks stand along each axis. The product is the number of processes."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes`, multiplied; of the whole layout where none is named."""
        return prod(getattr(self, axis) for axis in (axes or AXES))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        coordinate = dict.fromkeys(AXES, 0)
        for axis in reversed(AXES):
            rank, coordinate[axis] = divmod(rank, self.size(axis))
        return coordinate

    @property
    def width(self) -> int:
        """How many ranks read different samples: `replicate` x `shard`."""
        return self.size(*DATA_AXES)

    def data_index(self, rank: int) -> int:
        """Which share of each global batch `rank` reads; peers along tp, cp and pp share an index."""
        here = self.coordinate(rank)
        return here["replicate"] * self.shard + here["shard"]

    def __str__(self) -> str:
        used = [f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return " x ".join(used) or "one process"
