"""A small GPT, written as a user would, with nothing of Paceline in it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and MLP of one layer; x [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]; no dropout, weights not tied."""

    def __init__(
        self, layers: int = 7, width: int = 512, heads: int = 8, vocabulary: int = 2048, length: int = 256
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


SIZES = {
    "24M": {},
    "350M": {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 32768, "length": 1024},
    "4M": {"layers": 4, "width": 256, "vocabulary": 1024},
    "tiny": {"layers": 2, "width": 32, "vocabulary": 1024},
}


def gpt(size: str = "24M") -> GPT:
    """The same model on every call, on every rank."""
    torch.manual_seed(0)
    return GPT(**SIZES[size])


def tokens(rows: int, length: int, rank: int, vocabulary: int = 1024) -> Tensor:
    """Random tokens [rows, length + 1] of one rank: inputs and, shifted by one, targets."""
    return torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(rank))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy; logits [batch, length, vocabulary], targets [batch, length]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
