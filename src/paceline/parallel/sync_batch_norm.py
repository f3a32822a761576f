"""Batch normalisation over the batch of all ranks, on the CPU too, where torch's SyncBatchNorm refuses to run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


class _SumOverRanks(torch.autograd.Function):
    """Sums a tensor over a group; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return all_reduce(value, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return all_reduce(gradient.contiguous(), "sum", ctx.group), None


class SyncBatchNorm(_BatchNorm):
    """Normalises by statistics from one all-reduce of (count, sum, sum of squares) in float32.

    Not a subclass of torch's: DDP refuses that one on the CPU.

    Shape: input [batch, channels, ...]; ranks may hold different batch sizes. All ranks of the group call it.
    """

    process_group: Any = None

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any [batch, channels, ...] will do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises by the statistics of all ranks' batches while training, by the running ones otherwise."""
        training = self.training or (self.running_mean is None and self.running_var is None)
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        if not training or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, training, self._momentum(), self.eps
            )
        dims = [dim for dim in range(input.dim()) if dim != 1]
        count = input.new_full((1,), input.numel() / input.shape[1], dtype=torch.float32)
        wide = input.float()
        sums = torch.cat([count, wide.sum(dims), (wide * wide).sum(dims)])
        total, mean, square = _SumOverRanks.apply(sums, group).split([1, input.shape[1], input.shape[1]])
        mean, variance = mean / total, square / total - (mean / total) ** 2
        self._remember(mean.detach(), variance.detach(), total.detach())
        shape = [1, -1] + [1] * (input.dim() - 2)
        result = (wide - mean.view(shape)) * torch.rsqrt(variance.view(shape) + self.eps)
        if self.weight is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _momentum(self) -> float:
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return self.momentum
        return 1.0 / max(1, int(self.num_batches_tracked)) if self.num_batches_tracked is not None else 0.0

    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, total: torch.Tensor) -> None:
        momentum = self._momentum()
        if self.running_mean is not None and self.running_var is not None and self.track_running_stats:
            unbiased = variance * total / (total - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def replace_on_cpu(model: nn.Module, group: Any) -> None:
    """Turns torch's SyncBatchNorm modules of a model on the CPU into ours, in place; parameters stay the same objects."""
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm
            if module.process_group is None:
                module.process_group = group
