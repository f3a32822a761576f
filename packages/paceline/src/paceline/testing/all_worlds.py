"""Worlds and layouts without processes: topology is arithmetic, and is tested as such."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from paceline.world.layout import AXES, Layout
from paceline.world.world import World


def worlds(size: int, *, local_size: int | None = None, device: str = "cpu") -> list[World]:
    """Returns the `World` of each of `size` ranks, `local_size` of them on a host (all on one, by default)."""
    per_host = local_size or size
    hosts = -(-size // per_host)
    return [
        World(
            rank=rank,
            size=size,
            local_rank=rank % per_host,
            local_size=min(per_host, size - rank // per_host * per_host),
            node=rank // per_host,
            nodes=hosts,
            device=device,
            source="testing",
        )
        for rank in range(size)
    ]


def layouts(size: int) -> Iterator[Layout]:
    """Every layout of `size` ranks."""
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    for sizes in product(divisors, repeat=len(AXES)):
        layout = Layout(**dict(zip(AXES, sizes, strict=True)))
        if layout.size() == size:
            yield layout
