"""Llama 3 in plain PyTorch, as far as a rehearsal needs it: shapes, attention, rotary embedding, and the loss over all tokens.

    python llama.py --size 8b --batch 2 --length 8192
    python llama.py --size 8b --batch 1 --length 32768 --cp 4      this many tokens on each of 4 ranks of a sequence

Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ring import Ring
from torch import Tensor, nn
from torch.nn import functional

from paceline import Accelerator


@dataclass(frozen=True)
class Size:
    """The widths of one model of the family."""

    layers: int
    width: int
    heads: int
    hidden: int
    kv_heads: int = 8
    vocabulary: int = 128_256


SIZES = {
    "8b": Size(32, 4096, 32, 14_336),
    "70b": Size(80, 8192, 64, 28_672),
    "405b": Size(126, 16_384, 128, 53_248),
}


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs of channels by the angle of their position. Shape: x [B, L, H, D], angles [L, D / 2] complex."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads = size.heads, size.kv_heads
        head = size.width // size.heads
        self.wq = nn.Linear(size.width, size.width, bias=False)
        self.wk = nn.Linear(size.width, size.kv_heads * head, bias=False)
        self.wv = nn.Linear(size.width, size.kv_heads * head, bias=False)
        self.wo = nn.Linear(size.width, size.width, bias=False)
        self.group: dist.ProcessGroup | None = None  # of the ranks of a divided sequence

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query = rotated(self.wq(x).view(rows, length, self.heads, -1), angles)
        key = rotated(self.wk(x).view(rows, length, self.kv_heads, -1), angles)
        value = self.wv(x).view(rows, length, self.kv_heads, -1)
        times = self.heads // self.kv_heads
        key = key.repeat_interleave(times, 2)
        value = value.repeat_interleave(times, 2)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if self.group is None:
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            out = Ring.apply(query, key, value, self.group)
        return self.wo(out.transpose(1, 2).contiguous().view(rows, length, -1))


class FeedForward(nn.Module):
    """A gated layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.width, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.width, bias=False)
        self.w3 = nn.Linear(size.width, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The whole model."""

    def __init__(self, size: Size, length: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.width)
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)
        head = size.width // size.heads
        rates = 1.0 / 500_000 ** (torch.arange(0, head, 2) / head)
        steps = torch.outer(torch.arange(length), rates)
        self.register_buffer("angles", torch.polar(torch.ones_like(steps), steps), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.output(self.norm(x))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Shape: logits [B, L, V], tokens [B, L]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def main() -> None:
    """Trains two steps on random tokens."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--cp", type=int, default=1, help="ranks of a sequence; the whole model is divided along it")
    options = parser.parse_args()
    accelerator = Accelerator()
    with torch.device("meta"):
        model = Llama(SIZES[options.size], options.length)
    if options.cp > 1:
        group = dist.new_group(list(range(options.cp)))
        for layer in model.layers:
            layer.attention.group = group
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        tokens = torch.randint(0, 128_256, (options.batch, options.length), device=accelerator.device)
        if accelerator.plan.layout.pp > 1:
            accelerator.forward_backward(model, (tokens, tokens), loss_of)
        else:
            accelerator.backward(loss_of(model(tokens), tokens))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
