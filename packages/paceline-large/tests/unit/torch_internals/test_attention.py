"""The kernels of attention behind torch's own, and the code of its multi-head attention."""

import torch
from torch import nn
from torch.nn import functional

from paceline_large.torch_internals.attention import (
    flash_attention,
    flash_attention_backward,
    multi_head_attention_with,
)


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3)]


def test_the_kernel_gives_outputs_sums_of_exponentials_and_gradients() -> None:
    query, key, value = inputs()
    want = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    want.sum().backward()
    with torch.no_grad():
        out, lse = flash_attention(query, key, value, True, 0.5)
        gradients = flash_attention_backward(torch.ones_like(out), query, key, value, out, lse, True, 0.5)
    torch.testing.assert_close(out, want)
    scores = (query @ key.mT * 0.5).masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    for mine, tensor in zip(gradients, (query, key, value), strict=True):
        torch.testing.assert_close(mine, tensor.grad)


def test_multi_head_attention_calls_the_attention_that_it_is_given() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(5, 3, 8)
    calls = []

    def attention(query, key, value, mask, dropout, causal):
        calls.append((query.shape, mask, dropout, causal))
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout, causal)

    given = (
        x, x, x, 8, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0,
        layer.out_proj.weight, layer.out_proj.bias,
    )  # fmt: skip
    out, _ = multi_head_attention_with(attention, *given, need_weights=False)
    torch.testing.assert_close(out, layer(x, x, x, need_weights=False)[0])
    assert calls == [((3, 2, 5, 4), None, 0.0, False)]
