"""The models of drawn programs: [rows, 4] -> [rows, 4]. Their source is copied into the scripts that `script` prints."""

import torch
from torch import nn

from paceline import PackedDocuments


class Net(nn.Module):
    """A body and a head; `side` is a second head, which every second step uses, or none."""

    def __init__(self, body, side=False):
        super().__init__()
        self.body = body
        self.head = nn.Linear(4, 4)
        self.side = nn.Linear(4, 4) if side else None

    def forward(self, x, odd=False):
        return (self.side if odd else self.head)(self.body(x))


class Mlp(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class BatchNorm(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        # A bias would be taken away with the mean: its gradient is rounding alone, which Adam divides by its own size.
        self.first = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.tanh(self.norm(self.first(x)))


class LayerNorm(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.norm, self.first = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.first(self.norm(x)))


class Convolution(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 1, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x.unsqueeze(1))))).squeeze(1)


class Embedding(nn.Module):
    """The four numbers of a row choose four of eight vectors. Tied: the vectors are also the weight of the output layer."""

    def __init__(self, tied=False):
        super().__init__()
        self.vectors, self.out = nn.Embedding(8, 4), nn.Linear(4, 8)
        if tied:
            self.out.weight = self.vectors.weight

    def forward(self, x):
        tokens = (x.detach().abs() * 3).long() % 8
        return torch.tanh(self.out(self.vectors(tokens).mean(1)))[:, :4] + x


class Attention(nn.Module):
    """Each row is two tokens of two numbers.

    Without biases: the gradient of the keys' bias is zero but for rounding, of which Adam makes whole steps.
    """

    def __init__(self, tied=False):
        super().__init__()
        self.mix = nn.MultiheadAttention(2, 1, bias=False, batch_first=True)

    def forward(self, x):
        tokens = x.unflatten(1, (2, 2))
        return tokens.flatten(1) + self.mix(tokens, tokens, tokens, need_weights=False)[0].flatten(1)


class Recurrent(nn.Module):
    """Each row is two steps of two numbers."""

    def __init__(self, tied=False):
        super().__init__()
        self.steps = nn.GRU(2, 2, batch_first=True)

    def forward(self, x):
        return self.steps(x.unflatten(1, (2, 2)))[0].flatten(1)


class Block(nn.Module):
    """The MLP of a transformer, whose layers `tp` knows by their names."""

    def __init__(self):
        super().__init__()
        self.norm, self.up_proj, self.down_proj = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


class Blocks(nn.Sequential):
    """Two equal blocks, which `pp` divides into stages."""

    def __init__(self, tied=False):
        super().__init__(Block(), Block())


class WideBlock(nn.Module):
    """A block whose weights are large enough for states of 8 bits, and of sizes for products in float8."""

    def __init__(self):
        super().__init__()
        self.norm, self.up_proj, self.down_proj = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x))))


class Wide(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 64), nn.Sequential(WideBlock(), WideBlock())
        self.last = nn.Linear(64, 4)

    def forward(self, x):
        return torch.tanh(self.last(self.blocks(self.first(x))))


class Documents(nn.Module):
    """Attention inside of each document of a packed row: [1, tokens] -> [tokens, 4]."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.positions = nn.Embedding(8, 4), nn.Embedding(9, 4)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids) + self.positions(position_ids)
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = PackedDocuments(position_ids).attention(q, k, v)
        return (x + torch.tanh(self.out(mixed.transpose(1, 2).flatten(2))))[0]


class PackedNet(Net):
    """A net that takes a row of packed documents."""

    def forward(self, input_ids, position_ids, odd=False):
        return (self.side if odd else self.head)(self.body(input_ids, position_ids))


class TwoExperts(nn.Module):
    """The stacked weights of two experts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4) * 0.5)

    def forward(self, tokens, top_k_index, top_k_weights):
        out = torch.zeros_like(tokens)
        for expert in range(len(self.weight)):
            rows, place = torch.where(top_k_index == expert)
            out = out.index_add(0, rows, tokens[rows] @ self.weight[expert] * top_k_weights[rows, place, None])
        return out


class StackedMixture(nn.Module):
    """Each row goes to one of two experts, which `ep` divides."""

    def __init__(self, tied=False):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), TwoExperts()

    def forward(self, x):
        weights, index = torch.topk(self.gate(x).softmax(-1), 1)
        return x + torch.tanh(self.experts(x, index, weights))


class ListedMixture(nn.Module):
    """The same with a module for each expert, which is called if it gets a row."""

    def __init__(self, tied=False):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        weights, index = torch.topk(self.gate(x).softmax(-1), 1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(index == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return x + torch.tanh(out)


MIXTURES = (StackedMixture, ListedMixture)
BODIES = {
    body.__name__: body
    for body in (Mlp, BatchNorm, LayerNorm, Convolution, Embedding, Attention, Recurrent, Blocks, *MIXTURES)
}
# The bodies of `draw_low`.
LATER_BODIES = {body.__name__: body for body in (Wide, Documents)}
TIES = ("Mlp", "Embedding")  # the bodies that have layers to tie
