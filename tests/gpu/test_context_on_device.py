"""Ring attention's pieces on an accelerator: its own flash kernel merges to what attention to all keys gives."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline_large.context.ring_attention import _has_kernel, attend_piece, merge_into, piece_backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pieces_merge_to_the_whole(device, dtype):
    torch.manual_seed(0)
    query = torch.randn(2, 8, 128, 64, device=device, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, 4, 256, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    want = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    gradient = torch.randn_like(want)
    want.backward(gradient)
    if device.type == "cuda":
        assert _has_kernel(query, value, None) == (dtype != torch.float32)

    scale = 1 / math.sqrt(64)
    with torch.no_grad():
        out = torch.zeros(want.shape, device=device)
        lse = torch.full(want.shape[:-1], -math.inf, device=device)
        parts = [slice(0, 128), slice(128, 256)]
        for at in parts:
            merge_into(out, lse, *attend_piece(query, key[:, :, at], value[:, :, at], False, None, scale))
        d_query, d_key = torch.zeros_like(out), torch.zeros_like(key)
        for at in parts:
            d_part, d_key[:, :, at], _ = piece_backward(
                gradient, query, key[:, :, at], value[:, :, at], out.to(dtype), lse, False, None, scale
            )
            d_query += d_part
    close = {"atol": 2e-4 if dtype == torch.float32 else 3e-2, "rtol": 2e-2}
    torch.testing.assert_close(out.to(dtype), want.detach(), **close)
    torch.testing.assert_close(d_query.to(dtype), query.grad, **close)
    torch.testing.assert_close(d_key, key.grad, **close)


def test_a_causal_square_is_the_device_s_own(device):
    query, key, value = (torch.randn(1, 4, 64, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    out, lse = attend_piece(query, key, value, True, None, 0.125)
    want = scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out.to(want.dtype), want, atol=2e-2, rtol=2e-2)
    assert lse.shape == (1, 4, 64) and lse.dtype == torch.float32
