"""`gather_with_gradient`: rows of all ranks, through which gradients flow back to the ranks that computed them.

    forward     rows of all ranks, concatenated in rank order                [n, ...] -> [sum of n, ...]
    backward    the gradients of all ranks are summed, and each rank keeps those of its own rows

Why a sum: every rank computes the loss L over the rows of all ranks, and `accelerator.backward` averages gradients over the W
ranks, with weights w that sum up to W. Rank r gets the sum over q of w_q dL/dz_r = W dL/dz_r for its rows z_r. The average
over ranks of what that makes of the parameters is the gradient of L, as on one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.base.errors import TrainError
from paceline.parallel.differentiable import Differentiable
from paceline.plan.data import BatchInfo
from paceline.world.tree import Tree, map_tensors


def gather_with_gradient(tree: Tree, group: dist.ProcessGroup | None, info: BatchInfo | None) -> Tree:
    """Gathers each tensor along dim 0, with gradients.

    Args:
        tree: a nested structure of tensors.
        group: the ranks that read different samples; None for one process.
        info: the current batch: of a tensor with as many rows, only those of real samples are gathered.

    Shape: each tensor [n, ...], where n may differ by rank; returns [sum of n, ...].

    Ranks: all of the group, in the forward pass and in the backward pass.

    Raises:
        TrainError: `gather-scalar`, for a tensor without dimensions.
    """

    def gathered(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            raise TrainError(
                "gather-scalar",
                "a tensor without dimensions cannot be gathered with its gradient.",
                why="a loss that each rank computes from its own rows is averaged by `accelerator.backward` already",
                fix="gather the rows of which the loss is computed: `accelerator.gather(features, with_gradient=True)`",
            )
        if info is not None and len(tensor) == info.loaded:
            tensor = tensor[: info.real[info.index]]
        if group is None or dist.get_world_size(group) == 1:
            return tensor
        return _GatherRows.call(tensor, _counts(tensor, group), group)

    return map_tensors(gathered, tree)


def _counts(tensor: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Returns the number of rows on each rank. Ranks: all of the group."""
    own = torch.tensor([len(tensor)], device=tensor.device)
    counts = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, own, group=group)
    return [int(count) for count in counts]


class _GatherRows(Differentiable):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts = counts
        ctx.group = group
        # [most rows, ...]: collectives need tensors of one shape.
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A sum of all rows on all ranks: gloo's reduce-scatter takes longer than an all-reduce.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.counts)[dist.get_rank(ctx.group)], None, None
