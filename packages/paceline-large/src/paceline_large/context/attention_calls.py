"""Replaces `scaled_dot_product_attention` while a block computes, so that it sees the whole sequence.

A `TorchFunctionMode` sees every call of a torch function in this thread, however the function was imported. It also keeps
`nn.MultiheadAttention` from its fused path, which calls no torch function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.base.errors import TrainError
from paceline.world.sharded import is_sharded
from paceline_large.context.ring_attention import ring_attention
from paceline_large.context.sequence_split import SequenceRegion
from paceline_large.context.ulysses import ulysses_attention
from paceline_large.torch_internals.attention import multi_head_attention_with


class AttentionCalls(TorchFunctionMode):
    """While it is open, attention is computed over the whole sequence.

    Args:
        region: how the sequence is divided; it counts the calls of attention.
    """

    def __init__(self, region: SequenceRegion) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self.region.attended += 1
            return attend(self.region, *args, **kwargs)
        if func is functional.multi_head_attention_forward:
            self.region.attended += 1
            return _multi_head(self.region, *args, **kwargs)
        return func(*args, **kwargs)


def attend(
    region: SequenceRegion,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes `scaled_dot_product_attention` of this rank's positions to all positions.

    Args:
        region: how the sequence is divided.
        query, key, value: [(B,) H, L, E], L = `region.local`.
        attn_mask: for the whole sequence, [.., S, S] or [.., 1, S]; or for this rank's keys, [.., 1, L].
        dropout_p, is_causal, scale, enable_gqa: as in torch.

    Ranks: all of the cp group.

    Raises:
        TrainError: `context-attention`, `context-heads`.
    """
    if any(map(is_sharded, (query, key, value))):
        raise _refused("its inputs are DTensors", "keep the parallel styles' default of local outputs")
    if query.ndim == 3:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        return attend(region, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)
    lengths = [tensor.shape[-2] for tensor in (query, key, value)]
    if query.ndim != 4 or lengths != [region.local] * 3:
        raise _refused(
            f"queries {list(query.shape)} meet keys {list(key.shape)}, and {region.local} positions of the sequence are here",
            "use cp only for models whose blocks attend to their own sequence (no cross-attention, no cache of keys)",
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as torch does for this call
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = _whole_mask(attn_mask, region)
    if region.method == "ulysses":
        return ulysses_attention(query, key, value, region, is_causal, mask, scale, dropout_p)
    if dropout_p > 0:
        raise _refused(
            f"it drops weights (dropout_p={dropout_p:g}), which ring attention never holds",
            "set the dropout of attention to 0, or options={'context': {'method': 'ulysses'}}",
        )
    if is_causal and mask is not None:
        raise _refused("is_causal and attn_mask are both given", "give one of them, as torch asks")
    if mask is not None and mask.requires_grad:
        raise _refused("its mask is trained", "set options={'context': {'method': 'ulysses'}}")
    return ring_attention(query, key, value, region, is_causal, mask, scale)


def _refused(why: str, fix: str) -> TrainError:
    return TrainError("context-attention", "an attention cannot be divided along the sequence.", why=why, fix=fix)


def _whole_mask(mask: Tensor | None, region: SequenceRegion) -> Tensor | None:
    """Returns the mask for all keys. Shape: [B or 1, H or 1, S or 1, S]."""
    if mask is None:
        return None
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    if mask.stride(1) == 0:  # expanded over heads
        mask = mask[:, :1]
    rows, columns = mask.shape[-2:]
    if (rows, columns) == (1, region.local):  # of single keys, which are divided as they are
        sent = mask
        if mask.dtype == torch.bool:
            sent = mask.to(torch.uint8)
        return region.gather(sent, -1).to(mask.dtype)
    if columns == region.length and rows in (1, region.length):
        return mask
    raise _refused(
        f"its mask {list(mask.shape)} is for this rank's {region.local} positions, and not for all {region.length}",
        "make the mask before the blocks and pass it to them, or use is_causal=True",
    )


def _multi_head(region: SequenceRegion, *args: object, **kwargs: Any) -> object:
    """Computes `multi_head_attention_forward`. A mask for the whole sequence is not passed to it but applied in `attend`,
    since torch compares the mask with this rank's length."""
    if kwargs.get("need_weights", True):
        raise _refused(
            "nn.MultiheadAttention is asked for its weights, of which no rank holds a whole row",
            "call it with need_weights=False",
        )
    mask = kwargs.get("attn_mask")
    padding = kwargs.get("key_padding_mask")
    # With `is_causal`, and no padding to join it with, the mask only says the same once more: torch drops it.
    if mask is not None and not (kwargs.get("is_causal") and padding is None):
        kwargs["attn_mask"] = None
        kwargs["is_causal"] = False
    else:
        mask = None

    def attention(
        query: Tensor, key: Tensor, value: Tensor, keys: Tensor | None, dropout_p: float, is_causal: bool
    ) -> Tensor:
        whole = _joined(mask, _whole_mask(keys, region), query)
        return attend(region, query, key, value, whole, dropout_p, is_causal)

    return multi_head_attention_with(attention, *args, **kwargs)


def _joined(mask: Tensor | None, keys: Tensor | None, query: Tensor) -> Tensor | None:
    """Returns both masks as one that is added to the scores. Shape: as in `_whole_mask`."""
    if mask is None:
        return keys
    if mask.dtype == torch.bool:  # here True hides
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, float("-inf"))
    # torch takes [B * H, S, S], or [S, S] for all samples and heads.
    if mask.ndim == 3:
        mask = mask.unflatten(0, (query.shape[0], -1))
    else:
        mask = mask[None, None]
    if keys is None:
        return mask
    return mask + keys
