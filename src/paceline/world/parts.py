"""Parts of divided tensors as plain numbers, and bytes sent straight to the rank that wants them.

A rank's part of a tensor is, in each dim, a list of runs of the whole's rows: one run where a dim is cut once, several
where two axes cut the same dim. So every placement of DTensor looks alike to whoever puts a whole together or reads a part.

    whole  0 1 2 3 4 5 6 7   Shard(0) of 2, rank 1            ((4, 8),)
                             _StridedShard(0) x Shard(0) of 2 x 2, rank (0, 1)    ((4, 6),)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.torch_internals.dtensor import cut
from paceline.world.mesh import Group
from paceline.world.sharded import is_sharded
from paceline.world.works import wait_all

Run = tuple[int, int]  # first row and the one after the last
Part = tuple[tuple[Run, ...], ...]  # for each dim, in the order in which they lie in the rank's own tensor


def part_of_whole(tensor: Tensor) -> Part:
    """Which part of the whole this rank's own tensor is; no communication."""
    if not is_sharded(tensor):
        return tuple(((0, size),) for size in tensor.shape)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own meshes alone"
    rows: dict[int, Tensor] = {}
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        assert not placement.is_partial(), "what is kept is never a sum that is still to be taken"
        dim = placement.dim  # type: ignore[attr-defined]
        own = rows.get(dim, torch.arange(tensor.shape[dim], device="cpu"))
        shape = [1] * tensor.ndim
        shape[dim] = -1
        pieces = cut(own.view(shape), placement, mesh.size(axis))
        rows[dim] = pieces[coordinate[axis]].reshape(-1)
    part: list[tuple[Run, ...]] = [((0, size),) for size in tensor.shape]
    for dim, own_rows in rows.items():
        part[dim] = _runs(own_rows)
    return tuple(part)


def _runs(rows: Tensor) -> tuple[Run, ...]:
    if not rows.numel():
        return ()
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in rows.tensor_split(breaks))


def size_of(runs: tuple[Run, ...]) -> int:
    """Rows in some runs."""
    return sum(stop - start for start, stop in runs)


def regions(part: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """The boxes of a part: where each lies in the whole, and where in the rank's own tensor."""
    dims = []
    for runs in part:
        own = 0
        pairs = []
        for start, stop in runs:
            pairs.append((slice(start, stop), slice(own, own + stop - start)))
            own += stop - start
        dims.append(pairs)
    for box in product(*dims):
        in_whole = tuple(whole for whole, _ in box)
        in_own = tuple(own for _, own in box)
        yield in_whole, in_own


def rows_between(part: Part, start: int, stop: int) -> tuple[Part, int, int]:
    """What of a part lies in rows `start` to `stop` of the whole's dim 0, counted from `start`; and its own rows.

    Rows of a part ascend, so that what lies between two of them lies together in the rank's own tensor.
    """
    inside: list[Run] = []
    first_row = 0  # of this rank's own tensor
    own_rows = 0  # before the run at hand
    for run_start, run_stop in part[0]:
        low = max(run_start, start)
        high = min(run_stop, stop)
        if low < high:
            if not inside:
                first_row = own_rows + low - run_start
            inside.append((low - start, high - start))
        own_rows += run_stop - run_start
    runs = tuple(inside)
    return (runs, *part[1:]), first_row, first_row + size_of(runs)


def deliver(group: Group, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
    """Sends bytes to some ranks and receives from others, all at once.

    Args:
        group: the ranks that take part; it takes tensors on the CPU.
        outgoing: by rank of the group; of dtype uint8, on the CPU.
        incoming: how many bytes each other rank sends to this one; those who send none are left out.

    Ranks: those that send or receive. What one sends, the other must expect: nothing checks it.
    """
    if not outgoing and not incoming:
        return {}
    arrived = {rank: torch.empty(count, dtype=torch.uint8, device="cpu") for rank, count in incoming.items()}
    works = [dist.irecv(buffer, group=group, group_src=rank) for rank, buffer in arrived.items()]
    works += [dist.isend(data, group=group, group_dst=rank) for rank, data in outgoing.items()]
    wait_all(works)
    return arrived
