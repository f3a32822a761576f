"""A loop of one's own that saves a folder half-way: two models with an optimizer each, schedules, an object, a tied weight.

Options: `safe` for `save_state`; `mixed_precision`; `fsdp`, a kind of state dict, with `functions` for accelerate's functions
of FSDP in place of `save_state`.
"""

import json
import random
import sys

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
    set_seed,
)
from record import summary, write
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

folder, options = sys.argv[1], json.loads(sys.argv[2])


class Reader(nn.Module):
    """Embeds a number and says which number it was."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.hidden = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.0 if "fsdp" in options else 0.3)
        self.head = nn.Linear(16, 12, bias=False)
        if "fsdp" not in options:
            self.head.weight = self.embedding.weight

    def forward(self, numbers):
        """Logits."""
        return self.head(self.dropout(torch.tanh(self.hidden(self.embedding(numbers)))))


class Counter:
    """An object with a state of numpy's."""

    def __init__(self):
        self.seen = numpy.zeros(3, dtype=numpy.int64)

    def state_dict(self):
        """Its numbers."""
        return {"seen": self.seen, "pair": (1, "two")}

    def load_state_dict(self, state):
        """Takes numbers."""
        self.seen = state["seen"]


def run(resume):
    """Three epochs; the second time the last one."""
    plugin = None
    if "fsdp" in options:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=options["fsdp"], reshard_after_forward=True
        )
    accelerator = Accelerator(cpu=plugin is None, fsdp_plugin=plugin, mixed_precision=options.get("mixed_precision"))
    set_seed(5)
    reader = Reader()
    models = [reader] if plugin else [reader, nn.Linear(12, 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-2, fused=True) for model in models]
    optimizers[0].param_groups[0]["weight_decay"] = 0.1
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7) for optimizer in optimizers]
    loader = DataLoader(TensorDataset(torch.arange(48) % 12), batch_size=4, shuffle=True)
    prepared = accelerator.prepare(*models, *optimizers, *schedulers, loader)
    models, loader = prepared[: len(models)], prepared[-1]
    optimizers, schedulers = prepared[len(models) : 2 * len(models)], prepared[2 * len(models) : -1]
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    place = f"{folder}/half"
    if resume and options.get("functions"):
        load_fsdp_model(plugin, accelerator, models[0], place)
        load_fsdp_optimizer(plugin, accelerator, optimizers[0], models[0], place)
    elif resume:
        accelerator.load_state(place)
    losses = []
    for epoch in range(2 if resume else 0, 3):
        if epoch == 2 and options.get("functions"):
            # These functions keep neither random streams nor schedules.
            set_seed(6)
            for scheduler in schedulers:
                scheduler.scheduler.last_epoch = 0
        for (numbers,) in loader:
            logits = models[0](numbers)
            loss = nn.functional.cross_entropy(logits.float(), numbers)
            if len(models) > 1:
                loss = loss + models[1](logits).float().square().mean()
            accelerator.backward(loss)
            for each in (*optimizers, *schedulers):
                each.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            counter.seen[epoch] += len(numbers)
            losses.append([loss.item(), schedulers[0].get_last_lr()[0]])
        if epoch == 1 and options.get("functions"):
            save_fsdp_model(plugin, accelerator, models[0], place)
            save_fsdp_optimizer(plugin, accelerator, optimizers[0], models[0], place)
        elif epoch == 1:
            accelerator.save_state(place, **({"safe_serialization": options["safe"]} if "safe" in options else {}))
        accelerator.wait_for_everyone()
    draws = [random.random(), numpy.random.rand(), torch.rand(()).item()]
    weights = {}
    for number, model in enumerate(models):
        state = summary(accelerator.get_state_dict(model))
        # Under accelerate's FSDP rank 0 alone gets them.
        weights |= {f"{number}.{name}": numbers for name, numbers in state.items() if accelerator.is_main_process}
    write(folder, losses=losses, weights=weights, seen=counter.seen.tolist(), draws=draws)


run(options.get("resume", False))
