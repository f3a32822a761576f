"""Toy models for placements: blocks in a list, an embedding that is tied to the head or not, buffers that no file holds."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A residual block; `extra` in its call shows that keyword arguments arrive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, *, extra: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x if extra is None else x + extra


class Model(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, width: int = 16, num_blocks: int = 4, rows: int = 20, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, rows, bias=False)
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
        self.register_buffer("offset", torch.zeros(width))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        x = self.embedding(ids) * self.scale + self.offset
        for index in order or range(len(self.blocks)):
            x = self.blocks[index](x, extra=self.offset)
        return self.head(self.norm(x))


def made(**options: object) -> Model:
    """A model with values of its own, also in its buffers."""
    torch.manual_seed(0)
    model = Model(**options).eval()
    model.offset.uniform_()
    return model


IDS = torch.tensor([[1, 2, 3]])
