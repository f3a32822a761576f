"""The models of the parity suite: small, without dropout, each with what some plan finds hard."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn import functional

# `make simulated-device` runs the suite on accelerators, of which this machine then has as many as ranks.
ON_CPU = "SIMULATED_DEVICES" not in os.environ


class Attention(nn.Module):
    """Causal self-attention with projections of their own for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, self.num_heads, -1).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up_proj, self.down_proj = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down_proj(functional.gelu(self.up_proj(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with learned positions.

    Args:
        tied: the head shares the embedding's weight.
        frozen: the position embedding is not trained.
    """

    def __init__(self, tied: bool = False, frozen: bool = False, layers: int = 4, width: int = 16, heads: int = 4):
        super().__init__()
        self.embed, self.positions = nn.Embedding(24, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.positions.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions with batch norms, whose statistics are those of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        stages = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.Tanh())
            for a, b in ((1, 4), (4, 4), (4, 4))
        ]
        self.stages = nn.ModuleList(stages)
        self.out = nn.Linear(4, 5)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.out(x.mean((2, 3)))


def loss_of(output, target):
    """Mean cross entropy over everything that has a class."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())
