"""Where positions go, which arguments run along the sequence, and how attention to parts of the keys merges."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline import TrainError
from paceline_large.context.ring_attention import attend_piece, merge_into, piece_backward
from paceline_large.context.sequence_split import SequenceDivision, SequenceRegion, Sizes, sequence_dim


def region(length, ranks, rank, balanced):
    return SequenceRegion(SequenceDivision(length, ranks, balanced), None, rank, "ring", torch.device("cpu"))


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("length", "ranks"), [(4, 2), (5, 2), (9, 4), (16, 4), (17, 3), (64, 8)])
def test_every_position_is_somewhere_once(length, ranks, balanced):
    parts = [region(length, ranks, rank, balanced) for rank in range(ranks)]
    held = torch.cat([part.own[: part.division.real(rank)] for rank, part in enumerate(parts)])
    assert sorted(held.tolist()) == list(range(length))
    whole = torch.cat([part.own for part in parts])
    assert whole[parts[0].order].tolist() == list(range(length))
    for part in parts:
        assert part.own.tolist() == sorted(part.own.tolist())  # ascending: what is causal here is causal there
        assert part.local < length


def test_balanced_parts_are_equal_work():
    work = [sum(region(32, 4, rank, True).own.tolist()) for rank in range(4)]
    assert len(set(work)) == 1
    assert region(32, 4, 0, False).own.tolist() == list(range(8))


S, B, D = 12, 3, 8
SIZES = Sizes(1, S, B, D)


@pytest.mark.parametrize(
    ("shape", "name", "dtype", "dim"),
    [
        ((B, S, D), "hidden_states", torch.float, 1),
        ((1, S, 4), "cos", torch.float, 1),
        ((1, 1, S, 4), "cos", torch.float, 2),
        ((S, 4), "freqs", torch.float, 0),
        ((B, S), "position_ids", torch.long, 1),
        ((1, S), "position_ids", torch.long, 1),
        ((S,), "cache_position", torch.long, 0),
        ((B, S), "key_padding_mask", torch.bool, 1),
        ((B, S), "src_key_padding_mask", torch.float, 1),
        ((B, S, 1), "mask", torch.float, 1),
        ((B, 1, S, S), "attention_mask", torch.bool, None),
        ((B, 1, 1, S), "attention_mask", torch.float, None),
        ((S, S), "src_mask", torch.float, None),
        ((B, D), "condition", torch.float, None),
        ((B, 7, D), "memory", torch.float, None),
        ((), "scale", torch.float, None),
    ],
)
def test_which_dimension_runs_along_the_sequence(shape, name, dtype, dim):
    assert sequence_dim(torch.zeros(shape, dtype=dtype), name, SIZES) == dim


@pytest.mark.parametrize(
    ("shape", "sizes"), [((S, 4), Sizes(1, S, S, D)), ((S,), Sizes(1, S, S, D)), ((B, S), Sizes(1, S, B, S))]
)
def test_sizes_that_coincide_are_refused(shape, sizes):
    with pytest.raises(TrainError, match="context-ambiguous"):
        sequence_dim(torch.zeros(shape), "condition", sizes)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_to_parts_of_the_keys_merges(dtype, groups, masked):
    torch.manual_seed(0)
    query = torch.randn(2, 4, 10, 6, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(2, groups, 12, 6, dtype=dtype, requires_grad=True) for _ in range(2))
    mask = torch.rand(2, 1, 10, 12) < 0.5 if masked else None
    if mask is not None:
        mask[:, :, :, 0] = True  # the whole knows each row
        mask[:, :, 3, 5:] = False  # the second part does not
    want = scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    gradient = torch.randn_like(want)
    want.backward(gradient)

    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.zeros(2, 4, 10, 6, dtype=wide), torch.full((2, 4, 10), -math.inf, dtype=wide)
    with torch.no_grad():
        pieces = [slice(5, 12), slice(0, 5)]
        for at in pieces:
            part = None if mask is None else mask[..., at]
            merge_into(out, lse, *attend_piece(query, key[:, :, at], value[:, :, at], False, part, 0.3))
        d_query, d_key, d_value = torch.zeros_like(out), torch.zeros_like(key), torch.zeros_like(value)
        for at in pieces:
            part = None if mask is None else mask[..., at]
            more = piece_backward(gradient, query, key[:, :, at], value[:, :, at], out.to(dtype), lse, False, part, 0.3)
            d_query += more[0]
            d_key[:, :, at], d_value[:, :, at] = more[1], more[2]
    close = {"atol": 3e-2 if dtype == torch.bfloat16 else 2e-6, "rtol": 2e-2 if dtype == torch.bfloat16 else 1e-5}
    torch.testing.assert_close(out.to(dtype), want.detach(), **close)
    for got, leaf in zip((d_query, d_key, d_value), (query, key, value), strict=True):
        torch.testing.assert_close(got.to(dtype), leaf.grad, **close)
