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


class Experts(nn.Module):
    """Two-layer experts with stacked weights, computed one after the other. An expert without tokens gets zeros."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.2)
        self.up_bias = nn.Parameter(torch.randn(experts, 2 * width) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.2)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            rows, place = torch.where(top_k_index == expert)
            inner = functional.gelu(hidden_states[rows] @ self.up[expert] + self.up_bias[expert])
            out = out.index_add(0, rows, inner @ self.down[expert] * top_k_weights[rows, place, None])
        return out


class MixtureBlock(Block):
    """A block whose MLP is a Mixture of Experts, with a shared expert beside it (`up_proj`, `down_proj`).

    The last expert is never chosen.
    """

    def __init__(self, width: int, heads: int, experts: int = 4) -> None:
        super().__init__(width, heads)
        self.gate = nn.Linear(width, experts)
        with torch.no_grad():
            self.gate.bias[-1] = -1e3
        self.experts = Experts(width, experts)

    def forward(self, x):
        x = super().forward(x)
        flat = self.norm2(x).flatten(0, -2)
        weights, index = torch.topk(self.gate(flat).softmax(-1), 2)
        return x + self.experts(flat, index, weights).view(x.shape)


class ListedExperts(nn.Module):
    """A Mixture of Experts whose experts are modules of a list. Those without tokens are not called."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        with torch.no_grad():
            self.gate.bias[-1] = -1e3
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.passes += 1
        flat = x.flatten(0, -2)
        weights, index = torch.topk(self.gate(flat).softmax(-1), 2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(index == number)
            if len(rows):
                result = expert(flat[rows]) * weights[rows, place, None]
                out = out.index_add(0, rows, result.to(out.dtype))  # of another dtype under autocast
        return out.view(x.shape)


class ListedMixtureBlock(Block):
    """A block with a list of experts, and a shared expert beside it."""

    def __init__(self, width: int, heads: int, experts: int = 4) -> None:
        super().__init__(width, heads)
        self.moe = ListedExperts(width, experts)

    def forward(self, x):
        x = super().forward(x)
        return x + self.moe(self.norm2(x))


class Mixture(GPT):
    """A decoder with Mixtures of Experts, whose weights are stacked, or which are modules of a list."""

    def __init__(self, layers: int = 2, experts: int = 4, listed: bool = False) -> None:
        super().__init__(layers=layers)
        block = ListedMixtureBlock if listed else MixtureBlock
        self.blocks = nn.ModuleList(block(16, 4, experts) for _ in range(layers))


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
