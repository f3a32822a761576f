"""Ring attention: queries stay on their rank; keys and values are passed from rank to rank, which merge the partial results.

    step 0      own keys and values                    while they are used, those of the previous rank are received
    step s      those of rank i - s                    out, lse = merge((out, lse), (out_s, lse_s))
    backward    keys and values are passed round again; their gradients follow one step behind, and end on their own rank

`lse` is the logarithm of a row's sum of exponentials: with it, attention over parts of the keys merges exactly, and with
the merged one, each part's backward is that of the whole (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers", 2023; Dao et al., "FlashAttention", 2022). Under a causal mask and balanced chunks (`sequence_split`),
rank i computes its own square causally, all queries against the first chunk of an earlier rank, and its second chunk
against all of a later one: equal work for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.parallel.differentiable import Differentiable
from paceline.world.works import PendingMessages
from paceline_large.context.sequence_split import SequenceRegion
from paceline_large.torch_internals.attention import flash_attention, flash_attention_backward

_ALL = slice(None)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    region: SequenceRegion,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Computes attention of this rank's queries to the whole sequence.

    Args:
        query, key, value: of this rank's positions; groups of query heads may share a key head.
        region: where the other positions are; balanced.
        causal: queries see no later positions.
        mask: added to the scores (boolean: True is seen), for the whole sequence.
        scale: of the scores; None is 1 / sqrt(E).

    Shape: query [B, H, L, E], key [B, G, L, E], value [B, G, L, V], mask [B or 1, H or 1, S or 1, S]; gives [B, H, L, V].
        L is `region.local`, S `region.length`.

    Ranks: all of the group, in the forward and in the backward pass.
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    return _Ring.call(query, key, value, region, causal, mask, scale)


class _Ring(Differentiable):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        region: SequenceRegion,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        # out [B, H, L, V] and lse [B, H, L]: attention to no keys, into which that to each rank's keys is merged.
        out = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=_wide(query))
        lse = torch.full(query.shape[:-1], -math.inf, dtype=out.dtype, device=query.device)
        for source, k, v in _around(region, key, value):
            rows, columns, own = _piece(region, source, causal)
            # A rank may hold filler positions only, and then has no keys.
            if k[:, :, columns].shape[2]:
                mask_part = _mask_part(mask, region, source, columns)
                part_out, part_lse = attend_piece(
                    query[:, :, rows], k[:, :, columns], v[:, :, columns], own, mask_part, scale
                )
                merge_into(out[:, :, rows], lse[:, :, rows], part_out, part_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, mask)
        ctx.region = region
        ctx.causal = causal
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, mask = ctx.saved_tensors
        region = ctx.region
        wide = _wide(query)
        d_query = torch.zeros_like(query, dtype=wide)
        # Gradients of keys and values travel behind them: at each step a rank adds its part to those that have arrived, and
        # passes them on. After the last step they are on the rank that holds the keys.
        arriving = None
        d_key = key
        d_value = value
        for source, k, v in _around(region, key, value):
            d_key = torch.zeros_like(key, dtype=wide)
            d_value = torch.zeros_like(value, dtype=wide)
            rows, columns, own = _piece(region, source, ctx.causal)
            if k[:, :, columns].shape[2]:
                parts = piece_backward(
                    gradient[:, :, rows],
                    query[:, :, rows],
                    k[:, :, columns],
                    v[:, :, columns],
                    out[:, :, rows],
                    lse[:, :, rows],
                    own,
                    _mask_part(mask, region, source, columns),
                    ctx.scale,
                )
                for total, part, where in zip((d_query, d_key, d_value), parts, (rows, columns, columns), strict=True):
                    total[:, :, where] += part
            if arriving is not None:
                for total, part in zip((d_key, d_value), arriving.wait(), strict=True):
                    total += part
            arriving = _Shift(region, (d_key, d_value), tag=1)
        assert arriving is not None, "there is at least this rank's own part"
        d_key, d_value = arriving.wait()
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    """Returns the dtype in which partial results are summed: float32 for half precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _piece(region: SequenceRegion, source: int, causal: bool) -> tuple[slice, slice, bool]:
    """Returns this rank's queries and the keys of rank `source` that they see, and whether a causal mask applies to them."""
    if not causal:
        return _ALL, slice(region.division.real(source)), False
    if source == region.rank:
        return _ALL, _ALL, True
    # Of 2 n chunks rank i holds number i and number 2 n - 1 - i (`sequence_split`). All positions of this rank come after the
    # first chunk of an earlier rank and before its second one. Only this rank's second chunk comes after a later rank's.
    chunk = region.division.chunk
    if source < region.rank:
        return _ALL, slice(chunk), False
    return slice(chunk, None), _ALL, False


def _mask_part(mask: Tensor | None, region: SequenceRegion, source: int, columns: slice) -> Tensor | None:
    """Returns the part of the mask for this rank's queries and the keys of rank `source`."""
    if mask is None:
        return None
    rows = mask
    if mask.shape[-2] != 1:  # else one row for all queries
        rows = mask.index_select(-2, region.own)
    return rows.index_select(-1, region.positions(source)[columns])


# -- around the ring -------------------------------------------------------------------------------------------------


class _Shift:
    """One message of the ring: sends tensors to the next rank, and receives those of the previous rank."""

    def __init__(self, region: SequenceRegion, tensors: tuple[Tensor, ...], tag: int) -> None:
        self._sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._received = torch.empty_like(self._sent)
        self._like = tensors
        ranks = region.division.ranks
        after = dist.get_global_rank(region.group, (region.rank + 1) % ranks)
        before = dist.get_global_rank(region.group, (region.rank - 1) % ranks)
        # One batch, so that no rank waits with its receive until its send is done.
        both = [
            dist.P2POp(dist.isend, self._sent, after, region.group, tag),
            dist.P2POp(dist.irecv, self._received, before, region.group, tag),
        ]
        self._messages = PendingMessages()
        self._messages.begin(dist.batch_isend_irecv(both))

    def wait(self) -> tuple[Tensor, ...]:
        """Returns the tensors of the previous rank, in the shapes of those that were sent."""
        self._messages.wait()
        parts = self._received.split([tensor.numel() for tensor in self._like])
        return tuple(part.view(like.shape) for part, like in zip(parts, self._like, strict=True))


def _around(region: SequenceRegion, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields keys and values of each rank, this rank's first; the next ones are received while these are used."""
    ranks = region.division.ranks
    for step in range(ranks):
        # After the last step every rank has seen all keys and values, and nothing is sent.
        flight = None
        if step + 1 < ranks:
            flight = _Shift(region, (key, value), tag=0)
        yield (region.rank - step) % ranks, key, value
        if flight is not None:
            key, value = flight.wait()


# -- attention to some of the keys -----------------------------------------------------------------------------------


def merge_into(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merges attention to further keys into `out` and `lse`, in place. Shape: out [B, H, L, V], lse [B, H, L]."""
    both = torch.logaddexp(lse, more_lse)
    seen = both.isfinite()  # the mask may hide all keys so far from a row, which then has no attention yet
    share = torch.where(seen, (lse - both).exp(), 0.0).unsqueeze(-1)
    more_share = torch.where(seen, (more_lse - both).exp(), 0.0).unsqueeze(-1)
    out.mul_(share).addcmul_(more.to(out.dtype), more_share.to(out.dtype))
    lse.copy_(both)


def attend_piece(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes attention to these keys only, and the log of each row's sum of exponentials (float32, or the dtype if wider)."""
    key = _spread(key, query.shape[1])
    value = _spread(value, query.shape[1])
    if _has_kernel(query, value, mask):
        return flash_attention(query, key, value, causal, scale)
    scores = _scores(query, key, causal, mask, scale)
    lse = scores.logsumexp(-1)
    return _weights(scores, lse) @ value.to(scores.dtype), lse


def piece_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of queries, keys and values from these keys; `out` and `lse` are those of all keys."""
    groups = key.shape[1]
    key = _spread(key, query.shape[1])
    value = _spread(value, query.shape[1])
    if _has_kernel(query, value, mask):
        d_query, d_key, d_value = flash_attention_backward(gradient, query, key, value, out, lse, causal, scale)
    else:
        # weights, d_weights and d_scores are [B, H, L, S of these keys].
        weights = _weights(_scores(query, key, causal, mask, scale), lse)
        gradient, query, key, value, out = (tensor.to(weights.dtype) for tensor in (gradient, query, key, value, out))
        d_weights = gradient @ value.transpose(-1, -2)
        # The backward pass of softmax subtracts the sum of weights * d_weights over all keys. That is gradient * out, summed
        # over the features, so that the other ranks' keys are not needed for it.
        weighted_sum = (gradient * out).sum(-1, keepdim=True)
        d_scores = weights * (d_weights - weighted_sum) * scale
        d_query = d_scores @ key
        d_key = d_scores.transpose(-1, -2) @ query
        d_value = weights.transpose(-1, -2) @ gradient
    return d_query, _collect(d_key, groups), _collect(d_value, groups)


def _has_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Returns whether a flash kernel can be used: it must return `lse`, and with a mask, rows may have no keys at all."""
    if mask is not None or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cpu":
        return True
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and is_half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _spread(tensor: Tensor, heads: int) -> Tensor:
    """Repeats key heads so that each query head has one. Shape: [B, G, L, E] -> [B, heads, L, E]."""
    if tensor.shape[1] == heads:
        return tensor
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _collect(gradient: Tensor, groups: int) -> Tensor:
    """Sums the gradients of repeated key heads, see `_spread`. Shape: [B, heads, L, E] -> [B, G, L, E]."""
    if gradient.shape[1] == groups:
        return gradient
    by_group: Tensor = gradient.unflatten(1, (groups, -1))
    return by_group.sum(2, dtype=_wide(gradient))


def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    """Returns the scores before softmax, -inf where a query does not see a key. Shape: [B, H, L, S of these keys]."""
    wide = _wide(query)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * scale
    if causal:
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -math.inf)
    return scores + mask


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Returns exp(scores - lse), and 0 in rows that see no key."""
    return (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
