"""What the recorded checkpoint folders were made with, for both sides: the network, its optimizer, the data."""

import torch
from torch import nn


class Net(nn.Module):
    """Blocks between two layers, so that a pipeline can cut it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Counter:
    """A registered object."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count, "table": torch.arange(3.0)}

    def load_state_dict(self, state):
        self.count = state["count"]


def made(seed):
    """A network, an optimizer of two groups, and a schedule whose state holds a `Counter` of python's."""
    torch.manual_seed(seed)
    net = Net()
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return net, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 50], 0.5)


def rows(count=32):
    """Inputs and targets."""
    draw = torch.Generator().manual_seed(5)
    return torch.randn(count, 4, generator=draw), torch.randn(count, 3, generator=draw)


def loss_of(output, target):
    """Mean squared error."""
    return (output - target).square().mean()
