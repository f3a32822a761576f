"""Small scripts without Paceline for `paceline verify`: correct ones, and what becomes of each by one edit.

All of them run under torchrun's variables on one process and on several, on the CPU, and take four optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from verify_scripts import Edit, edited

_HEAD = """
import copy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""

_DATA = """
inputs = torch.randn(32, 6)
data = TensorDataset(inputs, inputs.sum(1).sin())
sampler = DistributedSampler(data, shuffle=True)
"""

DDP_SCRIPT = (
    _HEAD
    + _DATA
    + """
loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))
model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
average = copy.deepcopy(model.module)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.mse_loss(model(x)[:, 0], y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.module.parameters()):
                a.lerp_(p, 0.5)
"""
)

# By hand: two micro-batches in a step, then one all-reduce of each gradient.
HAND_SCRIPT = (
    _HEAD
    + _DATA
    + """
loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x)[:, 0], y) / 2
        loss.backward()
        if number % 2:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
"""
)

# A language model with tokens to ignore, whose loss is the mean over all tokens of the batch.
TOKENS_SCRIPT = (
    _HEAD
    + """
tokens = torch.randint(0, 11, (32, 6))
labels = tokens.roll(-1, 1)
labels[::3, 2:] = -100
labels[1::4, 4:] = -100
sampler = DistributedSampler(TensorDataset(tokens, labels), shuffle=False)
loader = DataLoader(TensorDataset(tokens, labels), batch_size=8 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    count = (y != -100).sum().float()
    dist.all_reduce(count)
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / count * world
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

FSDP_SCRIPT = (
    _HEAD
    + _DATA
    + """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
mesh = init_device_mesh("cpu", (world,))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = F.mse_loss(model(x)[:, 0], y)
    loss.backward()
    total = sum(p.grad.to_local().norm() ** 2 for p in model.parameters())
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad.mul_(0.1 / total.sqrt())
    optimizer.step()
    optimizer.zero_grad()
"""
)

# Tensor parallel by hand: a layer divided by columns, then one by rows, with their two collectives.
TP_SCRIPT = (
    _HEAD
    + """
class ToParts(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient

class FromParts(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, up, down = nn.Linear(6, 6), nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 1)
        self.up, self.down = nn.Linear(6, 8 // world, bias=False), nn.Linear(8 // world, 6, bias=False)
        self.up.weight.data = up.weight.data.chunk(world, 0)[rank].clone()
        self.down.weight.data = down.weight.data.chunk(world, 1)[rank].clone()

    def forward(self, x):
        x = self.norm(self.first(x))
        x = x + FromParts.apply(self.down(torch.tanh(self.up(ToParts.apply(x)))))
        return self.last(x)[:, 0]

model = Block()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1)
for step in range(5):
    x = torch.randn(8, 6)
    loss = F.mse_loss(model(x), x.sum(1).sin())
    loss.backward()
    squares = torch.zeros(())
    for name, p in model.named_parameters():
        squares += p.grad.norm() ** 2 * (1 if "up" in name or "down" in name else 1 / world)
    dist.all_reduce(squares)
    for p in model.parameters():
        p.grad *= 0.1 / squares.sqrt()
    optimizer.step()
    optimizer.zero_grad()
"""
)

# Sequence parallel by hand: each rank normalizes its part of the sequence; the rest sees all of it.
SEQUENCE_SCRIPT = (
    _HEAD
    + """
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(context, gradient):
        return gradient.chunk(world, 1)[rank].contiguous()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.head(Gather.apply(self.norm(x.chunk(world, 1)[rank])))

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1)
for step in range(5):
    x = torch.randn(4, 8, 6)
    loss = (model(x) ** 2).mean()
    loss.backward()
    for p in model.norm.parameters():
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
)

# Experts by hand: four experts, divided by the ranks; each sample goes to the rank of its expert, and comes back.
EXPERTS_SCRIPT = (
    _HEAD
    + _DATA
    + """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        out = torch.empty_like(x)
        if world == 1:
            return x.clone()
        parts = [torch.empty_like(part) for part in x.chunk(world)]
        gathered = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(gathered, x.contiguous())
        return torch.cat([other.chunk(world)[rank] for other in gathered])

    @staticmethod
    def backward(context, gradient):
        return Exchange.forward(None, gradient)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        experts = [nn.Linear(6, 6) for _ in range(4)]
        self.experts = nn.ModuleList(experts[rank * 4 // world:(rank + 1) * 4 // world])
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        h = self.first(x)
        # All experts see all samples: a copy of each sample goes to each rank.
        h = Exchange.apply(torch.cat([h] * world)).chunk(world)
        h = torch.cat([sum(torch.tanh(expert(part)) for expert in self.experts) for part in h])
        h = sum(Exchange.apply(h).chunk(world))
        return self.last(h)[:, 0]

loader = DataLoader(data, batch_size=8 // world, sampler=sampler)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    for name, p in model.named_parameters():
        if "experts" not in name:
            dist.all_reduce(p.grad)
        p.grad /= world
    optimizer.step()
    optimizer.zero_grad()
"""
)

# A second head for some samples: a rank may have none of them.
_EXTRA: Sequence[Edit] = [
    ("model = nn", "extra = nn.Linear(6, 1)\nmodel = nn"),
    (
        "y) / 2\n",
        "y) / 2\n        some = x[x[:, 0] > 1.5]\n        if len(some):\n            loss = loss + (extra(some) ** 2).sum() / len(x) / 2\n",  # noqa: E501
    ),
    ("model.parameters()", "[*model.parameters(), *extra.parameters()]"),
    (
        "dist.all_reduce(p.grad)",
        "if p.grad is None:\n                    p.grad = torch.zeros_like(p)\n                dist.all_reduce(p.grad)",
    ),
    ("0.3)", "1e9)"),
]

CORRECT_BARE: dict[str, str] = {
    "ddp": DDP_SCRIPT,
    "by hand": HAND_SCRIPT,
    "tokens": TOKENS_SCRIPT,
    "fsdp2": FSDP_SCRIPT,
    "tensor parallel": TP_SCRIPT,
    "sequence parallel": SEQUENCE_SCRIPT,
    "experts": EXPERTS_SCRIPT,
    "a batch of each rank": edited(DDP_SCRIPT, [("batch_size=8 // world", "batch_size=4")]),
    "no_sync in all but the last micro-batch": edited(
        HAND_SCRIPT,
        [
            ("optimizer = torch", "model = DDP(model)\noptimizer = torch"),
            (
                "        loss = F.mse_loss(model(x)[:, 0], y) / 2\n        loss.backward()\n",
                "        import contextlib\n"
                "        with contextlib.nullcontext() if number % 2 else model.no_sync():\n"
                "            loss = F.mse_loss(model(x)[:, 0], y) / 2\n            loss.backward()\n",
            ),
            (
                "            for p in model.parameters():\n                dist.all_reduce(p.grad)\n                p.grad /= world\n",  # noqa: E501
                "",
            ),
        ],
    ),
    "an average after each micro-batch": edited(
        HAND_SCRIPT,
        [
            (
                "        if number % 2:\n            for p in model.parameters():\n                dist.all_reduce(p.grad)\n"
                "                p.grad /= world\n",
                "        for p in model.parameters():\n            dist.all_reduce(p.grad)\n            p.grad /= world\n"
                "        if number % 2:\n",
            )
        ],
    ),
    "synchronized batch norm by hand": edited(
        DDP_SCRIPT, [("nn.Tanh(), nn.Dropout(0.1)", "nn.Tanh(), nn.LayerNorm(8)")]
    ),
    "a head that some ranks use": edited(HAND_SCRIPT, _EXTRA),
    "the loss is averaged to be read": edited(
        DDP_SCRIPT,
        [
            (
                "        optimizer.step()\n",
                "        shown = loss.detach().clone()\n        dist.all_reduce(shown)\n"
                "        shown.div_(world).item()\n        optimizer.step()\n",
            )
        ],
    ),
    "a master copy of the weights": edited(
        HAND_SCRIPT,
        [
            (
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
                "masters = [p.detach().clone() for p in model.parameters()]\noptimizer = torch.optim.SGD(masters, lr=0.1)",
            ),
            (
                "            optimizer.step()\n            optimizer.zero_grad()\n",
                "            for m, p in zip(masters, model.parameters()):\n                m.grad = p.grad.clone()\n"
                "            optimizer.step()\n"
                "            for m, p in zip(masters, model.parameters()):\n                p.data.copy_(m)\n"
                "            model.zero_grad()\n",
            ),
        ],
    ),
}

_REDUCE = "                dist.all_reduce(p.grad)\n                p.grad /= world\n"
_STEP = "            optimizer.step()\n            optimizer.zero_grad()\n"
_WHEN = "        if number % 2:\n            for p in model.parameters():\n"

# What is broken -> the cause, the script, the edits.
BROKEN_BARE: dict[str, tuple[str, str, Sequence[Edit]]] = {
    "a sum without a division": (
        "gradient-sum",
        HAND_SCRIPT,
        [
            ("                p.grad /= world\n", ""),
            ("            nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n", ""),
        ],
    ),
    "divided twice": ("divided-twice", HAND_SCRIPT, [("p.grad /= world", "p.grad /= world ** 2"), ("0.3)", "1e9)")]),
    "the loss of DDP divided by the ranks": (
        "loss-scaled",
        DDP_SCRIPT,
        [("mse_loss(model(x)[:, 0], y)", "mse_loss(model(x)[:, 0], y) / world"), ("0.5)\n", "1e9)\n")],
    ),
    "the loss times the ranks": (
        "loss-scaled",
        DDP_SCRIPT,
        [("mse_loss(model(x)[:, 0], y)", "mse_loss(model(x)[:, 0], y) * world"), ("0.5)\n", "1e9)\n")],
    ),
    "a sum over the samples": (
        "loss-scaled",
        DDP_SCRIPT,
        [("mse_loss(model(x)[:, 0], y)", "mse_loss(model(x)[:, 0], y, reduction='sum')"), ("0.5)\n", "1e9)\n")],
    ),
    "divided by the root of the ranks": (
        "gradient-factor",
        HAND_SCRIPT,
        [("p.grad /= world", "p.grad /= world ** 0.5"), ("0.3)", "1e9)")],
    ),
    "a parameter is forgotten": (
        "reduction-missing",
        HAND_SCRIPT,
        [
            (
                "for p in model.parameters():\n                dist",
                "for p in list(model.parameters())[1:]:\n                dist",
            ),
            ("0.3)", "1e9)"),
        ],
    ),
    "nothing is reduced": ("reduction-missing", HAND_SCRIPT, [(_REDUCE, "                pass\n"), ("0.3)", "1e9)")]),
    "the inner module of DDP is called": (
        "reduction-missing",
        DDP_SCRIPT,
        [("model(x)[:, 0]", "model.module(x)[:, 0]"), ("0.5)\n", "1e9)\n")],
    ),
    "reduced before the last micro-batch": (
        "reduced-too-early",
        HAND_SCRIPT,
        [
            (
                _WHEN + _REDUCE,
                "        if not number % 2:\n            for p in model.parameters():\n"
                + _REDUCE
                + "        if number % 2:\n",
            ),
            ("0.3)", "1e9)"),
        ],
    ),
    "summed after each micro-batch": (
        "reduced-again",
        HAND_SCRIPT,
        [
            (
                _WHEN + _REDUCE,
                "        for p in model.parameters():\n            dist.all_reduce(p.grad)\n        if number % 2:\n            for p in model.parameters():\n                p.grad /= world\n",  # noqa: E501
            ),
            ("0.3)", "1e9)"),
        ],
    ),
    "micro-batches are not divided": ("accumulation-not-divided", HAND_SCRIPT, [("y) / 2", "y)"), ("0.3)", "1e9)")]),
    "micro-batches are divided twice": (
        "accumulation-divided-twice",
        HAND_SCRIPT,
        [
            ("p.grad /= world", "p.grad /= world * 2"),
            ("            nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n", ""),
        ],
    ),
    "micro-batches are divided twice in the loss": (
        "accumulation-divided-twice",
        HAND_SCRIPT,
        [("loss.backward()", "(loss / 2).backward()")],
    ),
    "a mean over the tokens of a rank": (
        "mean-of-means",
        TOKENS_SCRIPT,
        [('reduction="sum") / count * world', 'reduction="mean")')],
    ),
    "clipped before the reduction": (
        "scaled-before-reduction",
        HAND_SCRIPT,
        [
            ("            nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n", ""),
            (
                _WHEN,
                "        if number % 2:\n            nn.utils.clip_grad_norm_(model.parameters(), 0.3)\n            for p in model.parameters():\n",  # noqa: E501
            ),
        ],
    ),
    "no DistributedSampler": (
        "data-repeated",
        DDP_SCRIPT,
        [
            (
                "batch_size=8 // world, sampler=sampler",
                "batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(0)",
            )
        ],
    ),
    "no DistributedSampler under FSDP2": (
        "data-repeated",
        FSDP_SCRIPT,
        [("batch_size=8 // world, sampler=sampler", "batch_size=8")],
    ),
    "each rank shuffles by itself": (
        "data-overlap",
        DDP_SCRIPT,
        [
            (
                "batch_size=8 // world, sampler=sampler",
                "batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank)",
            )
        ],
    ),
    "set_epoch is forgotten": ("epoch-repeats", DDP_SCRIPT, [("    sampler.set_epoch(epoch)\n", "")]),
    "a seed of the rank": ("model-by-rank", HAND_SCRIPT, [("model = nn", "torch.manual_seed(rank)\nmodel = nn")]),
    "a seed of the ranks": ("model-by-width", DDP_SCRIPT, [("model = nn", "torch.manual_seed(world)\nmodel = nn")]),
    "a head that some ranks use": (
        "gradient-on-some-ranks",
        edited(HAND_SCRIPT, _EXTRA),
        [
            (
                "if p.grad is None:\n                    p.grad = torch.zeros_like(p)\n                dist.all_reduce(p.grad)",
                "if not any(p is e for e in extra.parameters()):\n                    dist.all_reduce(p.grad)",
            ),
            ("p.grad /= world", "if p.grad is not None: p.grad /= world"),
        ],
    ),
    "batch norm": ("batch-norm-by-rank", DDP_SCRIPT, [("nn.Dropout(0.1)", "nn.BatchNorm1d(8)")]),
    "the rate by a rank's own loss": (
        "rate-by-rank",
        DDP_SCRIPT,
        [
            (
                "        optimizer.step()\n",
                "        optimizer.param_groups[0]['lr'] = 0.01 * loss.item()\n        optimizer.step()\n",
            )
        ],
    ),
    "the rate times the ranks": ("rate-by-ranks", DDP_SCRIPT, [("lr=0.01", "lr=0.01 * world")]),
    "noise of a rank's own": (
        "weights-by-rank",
        DDP_SCRIPT,
        [
            (
                "        optimizer.zero_grad()\n",
                "        optimizer.zero_grad()\n        with torch.no_grad():\n            for p in model.parameters():\n                p += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(rank))\n",  # noqa: E501
            )
        ],
    ),
    "an average of rank 0": (
        "copy-by-rank",
        DDP_SCRIPT,
        [
            ("        with torch.no_grad():", "        with torch.no_grad() if rank == 0 else torch.no_grad():"),
            ("                a.lerp_(p, 0.5)", "                a.lerp_(p, 0.5 if rank == 0 else 0.0)"),
        ],
    ),
    "an optimizer of copies": (
        "optimizer-of-copies",
        HAND_SCRIPT,
        [("SGD(model.parameters()", "SGD([p.detach().clone().requires_grad_() for p in model.parameters()]")],
    ),
    "the loss of FSDP2 times the ranks": (
        "loss-scaled",
        FSDP_SCRIPT,
        [
            ("mse_loss(model(x)[:, 0], y)", "mse_loss(model(x)[:, 0], y) * world"),
            ("        p.grad.mul_(0.1 / total.sqrt())", "        pass"),
        ],
    ),
    "FSDP2 divided twice": (
        "divided-twice",
        FSDP_SCRIPT,
        [("        p.grad.mul_(0.1 / total.sqrt())", "        p.grad.div_(world)")],
    ),
    "FSDP2 clipped by the norm of a rank's shards": (
        "scaled-by-rank",
        FSDP_SCRIPT,
        [("    dist.all_reduce(total)\n", "")],
    ),
    "tensor parallel without the all-reduce backward": (
        "partial-gradient",
        TP_SCRIPT,
        [
            ("        dist.all_reduce(gradient)\n        return", "        return"),
            ("        p.grad *= 0.1 / squares.sqrt()", "        pass"),
        ],
    ),
    "tensor parallel clipped by a rank's own norm": (
        "scaled-by-rank",
        TP_SCRIPT,
        [("    dist.all_reduce(squares)\n", "")],
    ),
    "sequence parallel without the sum": (
        "norm-gradient-partial",
        SEQUENCE_SCRIPT,
        [("        dist.all_reduce(p.grad)", "        pass")],
    ),
    "experts times ranks": (
        "expert-gradient-scaled",
        EXPERTS_SCRIPT,
        [("        p.grad /= world", "            p.grad /= world")],
    ),
    "features gathered without a gradient": (
        "loss-scaled",
        DDP_SCRIPT,
        [
            (
                "loss = F.mse_loss(model(x)[:, 0], y)",
                "own = model(x)[:, 0]\n        parts = [torch.empty_like(own) for _ in range(world)]\n        dist.all_gather(parts, own.detach())\n        parts[rank] = own\n        everyone = torch.cat(parts)\n        loss = (everyone ** 2).mean() + everyone.mean() ** 2",  # noqa: E501
            ),
            ("0.5)\n", "1e9)\n"),
        ],
    ),
}


def broken_bare(name: str) -> tuple[str, str]:
    """Returns the cause and the text of a broken script."""
    cause, text, edits = BROKEN_BARE[name]
    return cause, edited(text, edits)
