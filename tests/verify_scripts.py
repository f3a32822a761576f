"""Small scripts for `paceline verify`: a correct one, and what becomes of it by one edit each.

Every edit is a mistake that people make, under the name of its cause, or something correct that verify must leave alone.
"""

from __future__ import annotations

from collections.abc import Sequence

Edit = tuple[str, str]

CORRECT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from paceline import Accelerator, set_seed


class Points(Dataset):
    def __len__(self):
        return 45

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=draw)
        return x, x.sum().sin()


set_seed(0)
accelerator = Accelerator(cpu=True, log_with="jsonl")
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(Points(), batch_size=8, shuffle=True)
held_out = DataLoader(Points(), batch_size=8)
model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)


def loss_of(output, target):
    return nn.functional.mse_loss(output[:, 0], target)


for x, y in loader:
    with accelerator.accumulate(model):
        loss = loss_of(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
model.eval()
errors = []
with torch.no_grad():
    for x, y in held_out:
        errors.append(accelerator.gather_for_metrics((model(x)[:, 0] - y) ** 2))
accelerator.log({"error": torch.cat(errors).mean()}, step=6)
"""

_MODEL: Edit = ("nn.Tanh(), nn.Linear(8, 1))", "nn.Tanh(), LAYER, nn.Linear(8, 1))")
_PREPARE: Edit = (
    "model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)",
    "model, optimizer, held_out, schedule = accelerator.prepare(model, optimizer, held_out, schedule)",
)
_LOADER = "loader = DataLoader(Points(), batch_size=8, shuffle=True)"
_LOSS = "        loss = loss_of(model(x), y)\n"


def _layer(text: str) -> Edit:
    return _MODEL[0], _MODEL[1].replace("LAYER", text)


GOOD: dict[str, Sequence[Edit]] = {
    "plain": (),
    "dropout": (_layer("nn.Dropout(0.3)"),),
    "batch norm": (_layer("nn.BatchNorm1d(8)"),),
    "accumulation": (("cpu=True,", "cpu=True, gradient_accumulation_steps=2,"),),
    "a gather of several processes alone": (
        ("        errors.append(", "        if accelerator.num_processes > 1:\n"
         "            accelerator.gather_for_metrics(torch.ones(3))\n        errors.append("),
    ),
    "augmented data": (("return x, x.sum()", "return x + 0.1 * torch.randn(6, generator=draw), x.sum()"),),
    "sampler": (
        (_LOADER, "loader = DataLoader(Points(), batch_size=8, sampler=list(range(44, -1, -1)))"),
    ),
    "bf16": (("cpu=True,", 'cpu=True, mixed_precision="bf16",'),),
    "adam with a dead bias": (
        ("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.AdamW(model.parameters(), lr=0.01)"),
        _layer("nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)"),
    ),
    "a filled last batch": (("cpu=True,", "cpu=True, even_batches=True,"),),
    "a value by the clock": (
        ('accelerator.log({"error"', 'import time\naccelerator.log({"at": time.time(), "error"'),
    ),
    "items": (
        ("accelerator.backward(loss)", "accelerator.backward(loss, num_items=2 * len(x))"),
        ("mse_loss(output[:, 0], target)", 'mse_loss(output[:, 0], target, reduction="sum")'),
    ),
}  # fmt: skip

# What is wrong under several ranks alone -> its cause.
BROKEN: dict[str, tuple[str, Sequence[Edit]]] = {
    "the loader is not prepared": ("loader-unprepared", (_PREPARE,)),
    "a sampler that ignores the rank": (
        "sampler-ignores-rank",
        (
            _PREPARE,
            (
                _LOADER,
                "from torch.utils.data import DistributedSampler\n"
                "loader = DataLoader(Points(), batch_size=8, sampler=DistributedSampler(Points(), 1, 0))",
            ),
        ),
    ),
    "the script divides the samples itself": (
        "batch-by-rank",
        (
            _PREPARE,
            (
                _LOADER,
                "from torch.utils.data import DistributedSampler\n"
                "n, rank = accelerator.num_processes, accelerator.process_index\n"
                "loader = DataLoader(Points(), batch_size=8, sampler=DistributedSampler(Points(), n, rank))",
            ),
        ),
    ),
    "augmented by the rank": (
        "data-by-rank",
        (
            ("        x = torch.randn(6, generator=draw)\n",
             "        x = torch.randn(6, generator=draw) + 0.1 * accelerator.process_index\n"),
        ),
    ),
    "the learning rate times the ranks": ("rate-by-ranks", (("lr=0.1", "lr=0.1 * accelerator.num_processes"),)),
    "a long schedule is stretched by the processes": (
        "rate-differs",
        (("ExponentialLR(optimizer, 0.9)", "ExponentialLR(optimizer, 1 - 1e-5 / accelerator.num_processes)"),),
    ),
    "the scheduler steps per process": (
        "scheduler-by-process",
        (("        schedule.step()\n", "        for _ in range(accelerator.num_processes):\n            schedule.step()\n"),),
    ),
    "a warm-up by the ranks": (
        "rate-differs",
        (("ExponentialLR(optimizer, 0.9)",
          "LambdaLR(optimizer, lambda step: min(1, (step + 1) / (2 * accelerator.num_processes)))"),),
    ),
    "an order by the ranks": (
        "order-by-width",
        ((_LOADER, "import random\nrandom.seed(accelerator.num_processes)\n"
          "loader = DataLoader(Points(), batch_size=8, sampler=random.sample(range(45), 45))"),),
    ),
    "a seed by the ranks": (
        "model-by-width",
        (("set_seed(0)", ""), ('log_with="jsonl")', 'log_with="jsonl")\nset_seed(accelerator.num_processes)')),
    ),
    "batch norm by rank": ("batch-norm-by-rank", (
        _layer("nn.BatchNorm1d(8)"), ("cpu=True,", 'cpu=True, options={"batch_norm": {"statistics": "local"}},'),
    )),
    "a sum": ("sum-of-rows", (("mse_loss(output[:, 0], target)", 'mse_loss(output[:, 0], target, reduction="sum")'),)),
    "the loss times the ranks": (
        "loss-by-ranks", (("accelerator.backward(loss)", "accelerator.backward(loss * accelerator.num_processes)"),)),
    "only the main process draws": (
        "draws-by-rank",
        (("    with accelerator.accumulate(model):\n",
          "    if accelerator.is_main_process:\n        torch.rand(1)\n    with accelerator.accumulate(model):\n"),
         (_LOSS, "        loss = loss_of(model(x), y) * torch.rand(())\n")),
    ),
    "each rank draws its own": (
        "seeds-by-rank",
        ((_LOADER, "set_seed(1, device_specific=True)\n" + _LOADER),
         (_LOSS, "        loss = loss_of(model(x), y) * torch.rand(())\n")),
    ),
    "a mean over masked items": (
        "mean-of-means",
        (("return nn.functional.mse_loss(output[:, 0], target)",
          "return ((output[:, 0] - target) ** 2)[target > 0].mean()"),),
    ),
    "rows that are compared with each other": (
        "mean-of-means",
        (("return nn.functional.mse_loss(output[:, 0], target)",
          "return torch.cdist(output, target[:, None]).mean()"),),
    ),
    "gradients are added up": (
        "gradient-sum",
        (("        accelerator.clip_grad_norm_(model.parameters(), 1.0)\n",
          "        for p in model.parameters():\n"
          "            p.grad = accelerator.reduce(p.grad, 'sum')\n"),),
    ),
    "clipped by what a rank knows": (
        "clip-by-part",
        (("        accelerator.clip_grad_norm_(model.parameters(), 1.0)\n",
          "        factor = 0.1 / (1 + float(x.norm()))\n"
          "        for p in model.parameters():\n"
          "            p.grad *= factor\n"),),
    ),
    "micro-batches by the ranks": (
        "micro-batches-by-rank",
        (("    with accelerator.accumulate(model):\n", "    with accelerator.accumulate(model):\n        window += 1\n"),
         ("for x, y in loader:", "window = 0\nfor x, y in loader:"),
         ("        optimizer.step()\n        schedule.step()\n        optimizer.zero_grad()\n",
          "        if window % (3 - accelerator.num_processes) == 0:\n"
          "            optimizer.step()\n            schedule.step()\n            optimizer.zero_grad()\n"),
         ("accelerator.backward(loss)", "accelerator.backward(loss / (3 - accelerator.num_processes))")),
    ),
    "weights changed on one rank": (
        "weights-by-rank",
        (("        schedule.step()\n",
          "        schedule.step()\n"
          "        if accelerator.is_main_process and accelerator.num_processes > 1:\n"
          "            next(model.parameters()).data.mul_(1.01)\n"),),
    ),
    "a metric over padding": (
        "metric-over-padding",
        (("accelerator.gather_for_metrics(", "accelerator.gather("), ("cpu=True,", "cpu=True, even_batches=True,")),
    ),
    "a metric of one rank": (
        "metric-of-one-rank",
        (("accelerator.gather_for_metrics((model(x)[:, 0] - y) ** 2)", "(model(x)[:, 0] - y) ** 2"),),
    ),
    "a mean of means": (
        "metric-of-means",
        (("errors.append(accelerator.gather_for_metrics((model(x)[:, 0] - y) ** 2))",
          "errors.append(accelerator.reduce(((model(x)[:, 0] - y) ** 2).mean(), 'mean')[None])"),),
    ),
}  # fmt: skip

# What is wrong on one process already -> its cause.
# A script before it used Paceline, which is the same as `script(())`, and what becomes of it by one edit.
PLAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __len__(self):
        return 45

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        x = torch.randn(6, generator=draw)
        return x, x.sum().sin()


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(Points(), batch_size=8, shuffle=True)
for x, y in loader:
    loss = nn.functional.mse_loss(model(x)[:, 0], y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""
BROKEN_PLAIN: dict[str, tuple[str, Sequence[Edit]]] = {
    "another seed": ("plain-model", (("torch.manual_seed(0)", "torch.manual_seed(1)"),)),
    "another order": ("plain-samples", (("shuffle=True", "shuffle=False"),)),
    "another batch size": ("plain-samples", (("batch_size=8", "batch_size=9"),)),
    "another rate": ("plain-rate", (("lr=0.1", "lr=0.2"),)),
    "a schedule by epochs": ("plain-rate", (("    schedule.step()\n", ""),)),
    "dropout": ("plain-draws", (_layer("nn.Dropout(0.3)"),)),
    "no clipping": ("plain-computation", (("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),)),
}

BROKEN_ALONE: dict[str, tuple[str, Sequence[Edit]]] = {
    "no seed": ("unseeded-model", (("set_seed(0)", "torch.seed()"),)),
    "an order by the clock": (
        "unseeded-order",
        ((_LOADER, "import random, time\nrandom.seed(time.time_ns())\n"
          "loader = DataLoader(Points(), batch_size=8, sampler=random.sample(range(45), 45))"),),
    ),
    "an order by hashes": (
        "unseeded-order",
        ((_LOADER, "names = {f'sample {n}' for n in range(45)}\n"
          "loader = DataLoader(Points(), batch_size=8, sampler=[int(name.split()[1]) for name in names])"),),
    ),
    "augmented by the clock": (
        "data-by-clock",
        (("        x = torch.randn(6, generator=draw)\n",
          "        import time\n        x = torch.randn(6, generator=draw) + time.time_ns() % 1000 / 1000\n"),),
    ),
    "a draw without a seed": (
        "unseeded-draws",
        ((_LOADER, _LOADER + "\nimport random\nrandom.seed()"),
         (_LOSS, "        loss = loss_of(model(x), y) * random.random()\n")),
    ),
    "a result that changes": (
        "nondeterministic-kernel",
        ((_LOSS, "        import time\n        loss = loss_of(model(x), y) * (1 + time.time_ns() % 1000 / 1000)\n"),),
    ),
    "evaluation in train mode": (
        "evaluation-in-train-mode", (_layer("nn.BatchNorm1d(8)"), ("model.eval()\n", "")),
    ),
    "accumulated losses that are not divided": (
        "undivided-accumulation",
        (("    with accelerator.accumulate(model):\n", "    if True:\n"),
         ("for x, y in loader:", "for number, (x, y) in enumerate(loader, 1):"),
         ("        optimizer.step()\n        schedule.step()\n        optimizer.zero_grad()\n",
          "        if number % 2 == 0:\n"
          "            optimizer.step()\n            schedule.step()\n            optimizer.zero_grad()\n")),
    ),
}  # fmt: skip

_SEEDS_OF_RANKS: Edit = (_LOADER, "set_seed(1, device_specific=True)\n" + _LOADER)
# What draws for each row, as it may, and so cannot be compared.
DRAWING: dict[str, Sequence[Edit]] = {
    "noise": ((_LOSS, "        loss = loss_of(model(x) + 0.1 * torch.randn(len(x), 1), y)\n"),),
    "noise with seeds of the ranks": (
        _SEEDS_OF_RANKS, (_LOSS, "        loss = loss_of(model(x) + 0.1 * torch.randn(len(x), 1), y)\n"),
    ),
    "stochastic depth": ((_LOSS, "        loss = loss_of(model(x) * torch.bernoulli(torch.full((len(x), 1), 0.8)), y)\n"),),
    "noise of numpy": (
        (_LOSS, "        import numpy\n        loss = loss_of(model(x) + torch.tensor(numpy.random.rand(len(x), 1)), y)\n"),
    ),
}  # fmt: skip

# The same under accelerate's door, which lets more pass.
BROKEN_ACCELERATE: dict[str, tuple[str, Sequence[Edit]]] = {
    "an optimizer of copies": (
        "optimizer-of-copies",
        (("torch.optim.SGD(model.parameters(), lr=0.1)",
          "torch.optim.SGD([p.detach().clone().requires_grad_() for p in model.parameters()], lr=0.1)"),),
    ),
    "batch norm by rank": ("batch-norm-by-rank", (_layer("nn.BatchNorm1d(8)"),)),
    "accumulation that nothing declares": (
        "unused-accumulation",
        (("cpu=True)", "cpu=True, gradient_accumulation_steps=2)"),
         ("    with accelerator.accumulate(model):\n", "    if True:\n")),
    ),
    "the model is not prepared": (
        "model-unprepared",
        (("model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, ",
          "optimizer, loader, held_out, schedule = accelerator.prepare(optimizer, "),),
    ),
}  # fmt: skip


DEEPSPEED = """
import deepspeed
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(48, 6)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
config = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
}
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config, training_data=data
)
for x, y in loader:
    engine.backward(nn.functional.mse_loss(engine(x), y))
    engine.step()
"""


_DEEPSPEED_LOSS = "nn.functional.mse_loss(engine(x), y)"
_BY_RANK = "import os; torch.manual_seed(int(os.environ.get('RANK', 0)))"

# Name -> the cause that verify is to give, and the edits that break the script above.
BROKEN_DEEPSPEED: dict[str, tuple[str, Sequence[Edit]]] = {
    "a loader of its own": (
        "loader-unprepared",
        (("for x, y in loader:", "for x, y in torch.utils.data.DataLoader(data, batch_size=4):"),),
    ),
    "data seeded by the rank": ("data-by-rank", (("torch.manual_seed(0)", _BY_RANK),)),
    "a batch for each rank": ("batch-by-rank", (('"train_batch_size": 16', '"train_micro_batch_size_per_gpu": 8'),)),
    "a loss times ranks": ("loss-by-ranks", ((_DEEPSPEED_LOSS, f"{_DEEPSPEED_LOSS} * engine.world_size"),)),
    "a sum": ("sum-of-rows", ((_DEEPSPEED_LOSS, "nn.functional.mse_loss(engine(x), y, reduction='sum')"),)),
    "weights drawn on one rank": (
        "draws-by-rank",
        (("engine.step()", "engine.step(); engine.global_rank and nn.init.normal_(model[0].bias)"),),
    ),
}


def deepspeed_script(edits: Sequence[Edit]) -> str:
    """The correct script as people write it for DeepSpeed, with some edits."""
    return edited(DEEPSPEED, edits)


def accelerate_script(edits: Sequence[Edit]) -> str:
    """The correct script as people write it for accelerate, with some edits."""
    text = CORRECT.replace("from paceline import Accelerator, set_seed", _ACCELERATE).replace(', log_with="jsonl"', "")
    return edited(text, edits)


_ACCELERATE = "from accelerate import Accelerator\nfrom accelerate.utils import set_seed"


def script(edits: Sequence[Edit]) -> str:
    """The correct script with some edits, each of which must fit."""
    return edited(CORRECT, edits)


def edited(text: str, edits: Sequence[Edit]) -> str:
    for before, after in edits:
        assert before in text, before
        text = text.replace(before, after)
    return text
