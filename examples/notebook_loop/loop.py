# %% [markdown]
# # A training loop, call by call
#
# This is an ordinary training loop, with an explanation of each call of `accelerator`. This file is a script; the notebook
# `loop.ipynb` has the same cells.
#
#     python examples/notebook_loop/loop.py                            one process
#     paceline launch --procs 2 examples/notebook_loop/loop.py         two, with the same accuracies

# %%
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from paceline import Accelerator, set_seed

# %%
epochs = 5
batch_size = 100
in_features = 10
num_classes = 5
data_len = 10_000
output_dir = Path("runs/notebook_loop")


# %% [markdown]
# ## Data with something to learn
# The points of each class lie around their own centre. The classes overlap, so no model can classify all points correctly.


# %%
class Clouds(Dataset):
    """Points of five classes. Shape: x [10], y [] in 0 to 4."""

    def __init__(self, seed: int) -> None:
        centres = torch.randn(num_classes, in_features, generator=torch.Generator().manual_seed(0))
        draw = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, num_classes, (data_len,), generator=draw)
        self.x = centres[self.y] + 1.5 * torch.randn(data_len, in_features, generator=draw)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]

    def __len__(self) -> int:
        return len(self.x)


train_loader = DataLoader(Clouds(seed=1), batch_size=batch_size, shuffle=True)
val_loader = DataLoader(Clouds(seed=2), batch_size=batch_size)

# %% [markdown]
# ## The accelerator
# With `split_batches=True`, `batch_size` is that of all processes together, so the results do not depend on the number of
# processes. Without it, each process reads batches of this size.

# %%
set_seed(0)
accelerator = Accelerator(split_batches=True, data_seed=0)
accelerator.print(accelerator.device, f"{accelerator.num_processes} process(es)")

# %%
model = nn.Linear(in_features, num_classes)
optimizer = optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=1e-2)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
loss_fn = nn.CrossEntropyLoss()

# %%
model, optimizer, scheduler, train_loader, val_loader = accelerator.prepare(
    model, optimizer, scheduler, train_loader, val_loader
)


# %% [markdown]
# ## The loop
# `gather_for_metrics` gives every process the predictions, labels and losses of all processes, in the order of the data,
# with each sample once.


# %%
def accuracy(predictions: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    """The share of points that are classified correctly."""
    return (torch.cat(predictions).argmax(dim=1) == torch.cat(targets)).float().mean().item()


def run_epoch(epoch: int, name: str, loader: DataLoader) -> tuple[float, float]:
    """One pass over a loader, which trains if it is the training one; returns accuracy and mean loss."""
    training = name == "train"
    model.train(training)
    with tqdm(total=len(loader), desc=f"{epoch}/{epochs}", disable=not accelerator.is_main_process) as bar:
        all_predictions, all_targets, all_losses = [], [], []
        for x, y in loader:
            with torch.set_grad_enabled(training), accelerator.autocast():
                prediction = model(x)
                loss = loss_fn(prediction, y)
            if training:
                accelerator.backward(loss)  # instead of loss.backward()
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            bar.set_postfix({f"{name}/loss": f"{loss.item():.4f}"})
            bar.update(1)
            gathered = accelerator.gather_for_metrics((prediction.detach(), y, loss.detach()))
            for found, part in zip((all_predictions, all_targets, all_losses), gathered, strict=True):
                found.append(part)
        share, mean_loss = accuracy(all_predictions, all_targets), torch.cat(all_losses).mean().item()
        bar.set_postfix({f"{name}/acc": f"{share:.4f}"})
    return share, mean_loss


# %%
for epoch in range(1, epochs + 1):
    run_epoch(epoch, "train", train_loader)
    scheduler.step()
    val_acc, val_loss = run_epoch(epoch, "val", val_loader)

    accelerator.wait_for_everyone()  # every process must call this, or the others wait forever
    accelerator.save(  # writes on the main process only
        {
            "model": accelerator.get_state_dict(model),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        output_dir / "last.pth",
    )
accelerator.print(f"training finished: val/acc {val_acc:.4f}, val/loss {val_loss:.4f}")

# %% [markdown]
# ## What was saved
# `save` has written one file with the objects that you chose. `save_state` writes a folder with everything that a resume
# needs (weights, optimizer, scheduler, position in the data, random states), and `load_state` loads it with any number of
# processes.

# %%
accelerator.wait_for_everyone()
saved = torch.load(output_dir / "last.pth", map_location="cpu", weights_only=True)
accelerator.print({name: tuple(tensor.shape) for name, tensor in saved["model"].items()})

# %%
accelerator.save_state(output_dir / "checkpoint")
with torch.no_grad():
    accelerator.unwrap_model(model).weight.zero_()  # set the weights to zero ...
accelerator.load_state(output_dir / "checkpoint")  # ... and load the checkpoint
again, _ = run_epoch(epochs, "val", val_loader)
accelerator.print(f"read back: val/acc {again:.4f}")

# %%
accelerator.end_training()
