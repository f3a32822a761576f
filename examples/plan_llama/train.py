"""A Llama in plain PyTorch and an ordinary loop: for a plan with 7 billion parameters, or for training a small model.

paceline plan --procs 8 --nodes 8 --device h200-141GB --shard auto train.py
paceline launch --procs 2 train.py --layers 2 --width 64 --heads 4 --hidden 128 --vocabulary 256 --length 32 --steps 4
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from paceline import Accelerator, set_seed


def rotate(x: Tensor) -> Tensor:
    """Rotates each pair of features by an angle that grows with the position. x: [batch, heads, positions, features]."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device), rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.features = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        split = [
            part(x).unflatten(-1, (-1, self.features)).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(rotate(split[0]), rotate(split[1]), split[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(width), FeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Counting(Dataset[Tensor]):
    """Sequences of tokens that count upwards, as a stand-in for text."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(index, index + self.length + 1) % self.vocabulary


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in dict(vocabulary=32000, width=4096, layers=32, heads=32, hidden=11008, length=4096).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=1, help="sequences on each rank")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    model = Llama(args.vocabulary, args.width, args.layers, args.heads, args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(Counting(args.vocabulary, args.length), batch_size=args.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, tokens in enumerate(loader):
        if step == args.steps:
            break
        loss = accelerator.forward_backward(model, (tokens[:, :-1], tokens[:, 1:]), loss_of)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
