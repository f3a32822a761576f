"""Attention over a divided sequence as torch's `context_parallel` computed it in December 2024: what it moves and computes.

    keys and values    gathered once from all ranks, all heads of them; the backward pass gathers them again
    balance            a rank has two pieces of the sequence, one early and one late: every step but the first, which is causal,
                       is half of a square
    merging            results of steps are merged in float32
    backward           gradients of keys and values travel from rank to rank in float32, after each step

A rehearsal runs rank 0, whose later steps are those of its second piece alone. On real ranks the numbers would be wrong: the
pieces are not put in order. Source: `torch.distributed.tensor.experimental`, with torchtitan's settings (`allgather`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def gathered(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the keys and values of all ranks, flat."""
    own = torch.cat([key.flatten(), value.flatten()])
    every = own.new_empty(dist.get_world_size(group), own.numel())
    pieces = list(every.unbind())
    dist.all_gather(pieces, own, group)
    return pieces


def parted(flat: Tensor, shape: torch.Size) -> list[Tensor]:
    """Returns both halves of a flat tensor, in a shape."""
    return [half.view(shape) for half in flat.chunk(2)]


def late(tensor: Tensor) -> Tensor:
    """Returns the second piece of a rank's positions. Shape: [B, H, L, ...]."""
    return tensor.chunk(2, 2)[1]


def with_late(tensor: Tensor, piece: Tensor) -> Tensor:
    """Returns a copy of a tensor with another second piece."""
    return torch.cat([tensor.chunk(2, 2)[0], piece], 2)


class Ring(torch.autograd.Function):
    """Causal attention. Shape: [B, H, L, D] on each rank, for query, key, value and the result."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        key, value = key.contiguous(), value.contiguous()
        pieces = gathered(key, value, group)
        half, sums = _forward(query, key, value, 0.0, True)
        out, sums = half.float(), sums.float().unsqueeze(-1)
        for other in pieces[1:]:
            step, step_sums = _forward(late(query), *parted(other, key.shape), 0.0, False)
            step, step_sums = step.float(), step_sums.float().unsqueeze(-1)
            before, before_sums = late(out), late(sums)
            merged = before - torch.sigmoid(step_sums - before_sums) * (before - step)
            out = with_late(out, merged)
            sums = with_late(sums, before_sums - functional.logsigmoid(before_sums - step_sums))
        result = out.to(query.dtype)
        ctx.group = group
        ctx.save_for_backward(query, key, value, result, sums.squeeze(-1))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        pieces = gathered(key, value, ctx.group)
        grads = [part.float() for part in _backward(gradient, query, key, value, out, sums, 0.0, True)]
        grad_query, grad_key, grad_value = grads
        travelling = torch.cat([grad_key.flatten(), grad_value.flatten()])
        for other in pieces[1:]:
            arrived = torch.empty_like(travelling)
            dist.all_to_all_single(arrived, travelling, group=ctx.group)
            step = _backward(
                late(gradient),
                late(query),
                *parted(other, key.shape),
                late(out),
                late(sums).contiguous(),
                0.0,
                False,
            )
            grad_key, grad_value = parted(arrived, key.shape)
            grad_key = grad_key + step[1]
            grad_value = grad_value + step[2]
            grad_query = with_late(grad_query, late(grad_query) + step[0])
            travelling = torch.cat([grad_key.flatten(), grad_value.flatten()])
        arrived = torch.empty_like(travelling)
        dist.all_to_all_single(arrived, travelling, group=ctx.group)
        grad_key, grad_value = parted(arrived.to(key.dtype), key.shape)
        return grad_query.to(query.dtype), grad_key, grad_value, None
