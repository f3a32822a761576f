"""Describes a rank's part of a divided tensor by plain numbers, and sends bytes directly to the rank that needs them.

In each dim, a rank's part is a list of runs, which are ranges of rows of the whole tensor: one run if one axis divides the
dim, several if two axes divide the same dim. In this form every placement of DTensor is read and put together alike.

    whole  0 1 2 3 4 5 6 7   Shard(0) of 2, rank 1            ((4, 8),)
                             _StridedShard(0) x Shard(0) of 2 x 2, rank (0, 1)    ((4, 6),)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.torch_internals.dtensor import shard_of
from paceline.world.mesh import Group
from paceline.world.sharded import is_sharded
from paceline.world.works import wait_all

Run = tuple[int, int]  # first row and the one after the last
Part = tuple[tuple[Run, ...], ...]  # for each dim, in the order in which they lie in the rank's own tensor


def part_of_whole(tensor: Tensor) -> Part:
    """Returns which part of the whole this rank's own tensor is, without communication."""
    if not is_sharded(tensor):
        return tuple(((0, size),) for size in tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own meshes alone"
    # The numbers of the rows are cut as DTensor cuts the tensor itself, one axis after the other.
    rows: dict[int, Tensor] = {}
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        assert not placement.is_partial(), "what is kept is never a sum that is still to be taken"
        dim = placement.dim  # type: ignore[attr-defined]
        own = rows.get(dim, torch.arange(tensor.shape[dim], device="cpu"))
        shape = [1] * tensor.ndim
        shape[dim] = -1
        rows[dim] = shard_of(own.view(shape), placement, mesh.size(axis), coordinate[axis]).reshape(-1)
    part: list[tuple[Run, ...]] = [((0, size),) for size in tensor.shape]
    for dim, own_rows in rows.items():
        part[dim] = _runs(own_rows)
    return tuple(part)


def _runs(rows: Tensor) -> tuple[Run, ...]:
    """Joins ascending row numbers to runs: a new run begins where a number is not the one before it plus 1."""
    if not rows.numel():
        return ()
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in rows.tensor_split(breaks))


def size_of(runs: tuple[Run, ...]) -> int:
    """Returns the number of rows in some runs."""
    return sum(stop - start for start, stop in runs)


def regions(part: Part) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yields the boxes of a part: the slices of each box in the whole tensor, and in the rank's own tensor."""
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
    """Returns what of a part lies in rows `start` to `stop` of the whole's dim 0.

    The rows of a part ascend, so those between two rows are adjacent in the rank's own tensor.

    Returns:
        The part, with rows of dim 0 counted from `start`; then the first of its rows in the rank's own tensor, and the one
        after the last.
    """
    inside: list[Run] = []
    first_row = 0  # in this rank's own tensor
    own_rows = 0  # rows of this rank's own tensor before the current run
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
    """Sends bytes to some ranks and receives bytes from others, all at the same time.

    Args:
        group: the ranks that take part; it takes tensors on the CPU.
        outgoing: what to send, by rank of the group; of dtype uint8, on the CPU.
        incoming: how many bytes each other rank sends to this one; ranks that send none are left out.

    Ranks: those that send or receive. Nothing checks that a rank expects what another one sends.
    """
    if not outgoing and not incoming:
        return {}
    arrived = {rank: torch.empty(count, dtype=torch.uint8, device="cpu") for rank, count in incoming.items()}
    works = [dist.irecv(buffer, group=group, group_src=rank) for rank, buffer in arrived.items()]
    works += [dist.isend(data, group=group, group_dst=rank) for rank, data in outgoing.items()]
    wait_all(works)
    return arrived
