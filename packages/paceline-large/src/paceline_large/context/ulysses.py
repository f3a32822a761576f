"""Ulysses attention: an all-to-all turns "my positions, all heads" into "all positions, my heads", and back.

    [B, H, S/n, E]  -> exchange ->  [B, H/n, S, E]  -> any attention ->  [B, H/n, S, V]  -> exchange ->  [B, H, S/n, V]

Queries, keys and values are sent in one message. Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from paceline.base.errors import TrainError
from paceline.parallel.differentiable import Differentiable
from paceline_large.context.context import fitting
from paceline_large.context.sequence_split import SequenceRegion


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    region: SequenceRegion,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Computes attention of this rank's queries to the whole sequence.

    Args:
        query, key, value: of this rank's positions; groups of query heads may share a key head.
        region: where the other positions are; not balanced.
        causal: queries see no later positions.
        mask: added to the scores (boolean: True is seen), for the whole sequence.
        scale: of the scores; None is 1 / sqrt(E).
        dropout: probability that a weight is dropped.

    Shape: query [B, H, L, E], key [B, G, L, E], value [B, G, L, V], mask [B or 1, H or 1, S or 1, S]; gives [B, H, L, V].

    Ranks: all of the group, in the forward and in the backward pass.

    Raises:
        TrainError: `context-heads`.
    """
    ranks = region.division.ranks
    heads = query.shape[1]
    if heads % ranks:
        raise TrainError(
            "context-heads",
            f"{heads} attention heads cannot be divided by cp={ranks}.",
            why="method=ulysses gives each rank of the cp axis whole heads (with tp, of those that a tp rank holds)",
            fix="set options={'context': {'method': 'ring'}}, or cp to one of " + fitting(heads),
        )
    if key.shape[1] % ranks:  # fewer key heads than ranks: each query head gets its own
        key = key.repeat_interleave(heads // key.shape[1], 1)
        value = value.repeat_interleave(heads // value.shape[1], 1)
    # [B, H / n, n L, E]: all positions, with fillers at the end, which are cut off.
    of_own_heads = _to_heads([query, key, value], region)
    query, key, value = (tensor[:, :, : region.length] for tensor in of_own_heads)
    if mask is not None and mask.shape[1] == heads:
        mask = mask.chunk(ranks, 1)[region.rank]
    grouped = query.shape[1] != key.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped
    )
    num_fillers = ranks * region.local - region.length
    padded = functional.pad(out, (0, 0, 0, num_fillers))
    return _to_positions(padded, region)


class _ExchangeHeads(Differentiable):
    """Sends row i to rank i, and receives rank i's row as row i. It is its own inverse and its own backward. Shape: [n, k]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _ExchangeHeads.call(gradient.contiguous(), ctx.group), None


def _to_heads(tensors: list[Tensor], region: SequenceRegion) -> list[Tensor]:
    """[B, h, L, e] each, for my positions -> [B, h / n, n L, e], for my heads."""
    ranks = region.division.ranks
    # [B, h, L, e] -> [n, B, h / n, L, e]: row i is what rank i needs. All tensors travel in one message.
    sent = [tensor.unflatten(1, (ranks, -1)).movedim(1, 0) for tensor in tensors]
    message = torch.cat([rows.flatten(1) for rows in sent], 1)
    elements_of_a_row = [rows[0].numel() for rows in sent]
    received = _ExchangeHeads.call(message, region.group).split(elements_of_a_row, 1)
    by_head = []
    for flat, rows in zip(received, sent, strict=True):
        by_rank = flat.view(rows.shape)  # now row i is what rank i has sent: its positions
        by_head.append(by_rank.permute(1, 2, 0, 3, 4).flatten(2, 3))
    return by_head


def _to_positions(out: Tensor, region: SequenceRegion) -> Tensor:
    """[B, h / n, n L, e], for my heads -> [B, h, L, e], for my positions."""
    parts = out.unflatten(2, (region.division.ranks, -1)).movedim(2, 0)  # [n, B, h / n, L, e]
    received = _ExchangeHeads.call(parts.flatten(1), region.group).view(parts.shape)
    return received.movedim(0, 1).flatten(1, 2)
