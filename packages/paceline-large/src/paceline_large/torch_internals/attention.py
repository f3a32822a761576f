"""The kernels of attention that also give each row's sum of exponentials, and the code of `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of each row's sum of exponentials; on the CPU for any dtype, on CUDA for half precision.

    Shape: query, key, value [B, H, L, E]; gives [B, H, L, E] and [B, H, L].
    """
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def flash_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; `out` and `lse` may be those of attention to more keys than these.

    Shape: as in `flash_attention`; `gradient` that of `out`.
    """
    if query.device.type == "cpu":
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, causal, scale=scale
        )
    else:
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # without dropout nothing is drawn
        parts = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal,
            seed, seed.new_zeros(()), scale=scale,
        )  # fmt: skip
    d_query, d_key, d_value = parts
    return d_query, d_key, d_value


def multi_head_attention_with(attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """torch's `multi_head_attention_forward`, with `attention` in the place of `scaled_dot_product_attention`.

    Args:
        attention: called with query, key, value, mask, dropout probability and whether it is causal, by position.
        args, kwargs: of `multi_head_attention_forward`.
    """
    original = functional.multi_head_attention_forward
    names = {**original.__globals__, "scaled_dot_product_attention": attention, "has_torch_function": lambda _: False}
    run = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    return run(*args, **kwargs)
