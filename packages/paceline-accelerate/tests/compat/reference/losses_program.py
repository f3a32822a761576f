"""Losses of training loops with shuffling and dropout, step by step; under the real library and under ours.

python record_losses.py     -> recorded_losses.json
test_losses.py              -> compared with it
"""

import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler


class Points(Dataset):
    """x, and y = sin of a sum; with `noise`, x is drawn anew each time."""

    def __init__(self, count=23, noise=False):
        self.noise = noise
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        y = x.sum(0, keepdim=True).sin()
        return {"x": x + 0.1 * torch.randn(4) if self.noise else x, "y": y}


class Stream(IterableDataset):
    """The same, one after another."""

    def __iter__(self):
        points = Points()
        return (points[index] for index in range(len(points)))


def loop(kind="shuffled", epochs=3, folder=None, stop=None, resume=False, **options):
    """A loop without a Trainer: losses of this process, by step; saves after `stop` steps, or goes on from there."""
    set_seed(5)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Points(noise=kind == "noise")
    shuffle = {"shuffle": True}
    if kind == "weighted":
        shuffle = {"sampler": WeightedRandomSampler([1.0 + index for index in range(len(data))], len(data))}
    if kind == "lengths":
        from transformers.trainer_pt_utils import LengthGroupedSampler

        shuffle = {"sampler": LengthGroupedSampler(4, lengths=[index % 7 for index in range(len(data))])}
    if kind == "stream":
        data, shuffle = Stream(), {}
    loader = DataLoader(data, batch_size=4, **shuffle)
    held_out = DataLoader(Points(9), batch_size=4)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    losses = []
    step = first_epoch = skipped = 0
    if resume:
        accelerator.load_state(folder)
        per_epoch = -(-len(Points()) // (4 * accelerator.num_processes))
        first_epoch, skipped = divmod(stop, per_epoch)
        step = stop
    for epoch in range(first_epoch, epochs):
        loader.set_epoch(epoch)
        batches = loader
        if skipped and epoch == first_epoch and not options.get("use_stateful_dataloader"):
            batches = accelerator.skip_first_batches(loader, skipped)
        for batch in batches:
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
            if step == stop and not resume:
                accelerator.save_state(folder)
        model.eval()
        with torch.no_grad():
            for batch in held_out:
                model(batch["x"])
        model.train()
    accelerator.free_memory()
    return losses


def trainer(folder, **options):
    """transformers' Trainer on a small regression with dropout."""
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Linear(16, 1)
            )

        def forward(self, x, labels):
            out = self.net(x)
            return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

    class Labelled(Points):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return {"x": row["x"], "labels": row["y"]}

    set_seed(5)
    noise = options.pop("noise", False)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=3, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, seed=7, learning_rate=0.05, disable_tqdm=True, eval_strategy="epoch", **options,
    )  # fmt: skip
    made = Trainer(Net(), arguments, train_dataset=Labelled(noise=noise), eval_dataset=Labelled(9))
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


LOOPS = {
    "shuffled": {},
    "seedable": {"use_seedable_sampler": True},
    "data seed": {"use_seedable_sampler": True, "data_seed": 3},
    "weighted": {"kind": "weighted"},
    "lengths": {"kind": "lengths"},
    "noise": {"kind": "noise"},
    "dispatch": {"dispatch_batches": True},
    "stream": {"kind": "stream"},
    "split": {"split_batches": True},
    "stateful": {"use_stateful_dataloader": True},
}
TRAINERS = {
    "plain": {},
    "noise": {"noise": True},
    "data seed": {"data_seed": 11},
    "not seedable": {"accelerator_config": {"use_seedable_sampler": False}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "dispatch": {"accelerator_config": {"dispatch_batches": True}},
    "drop last": {"dataloader_drop_last": True},
}


def everything(folder):
    """Losses of all, on this process."""
    said = {f"loop, {name}": loop(**options) for name, options in LOOPS.items()}
    for name, options in TRAINERS.items():
        said[f"trainer, {name}"] = trainer(os.path.join(folder, "trainer"), **options)
    return said
