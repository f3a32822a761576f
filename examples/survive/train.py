"""Trains a model on Python code, byte by byte, and survives when its processes are killed.

python examples/survive/train.py
paceline launch --procs 2 --max-restarts 10 examples/survive/train.py

Kill any of its processes at any time, also the launcher, and then give the same command again. It continues from its newest
checkpoint, and ends with the same weights as without a failure. This needs `resume()`, the background save and `Keep`.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, Keep, set_seed

MODULES = "argparse ast calendar configparser csv dataclasses functools heapq inspect random statistics tempfile"


class Model(nn.Module):
    """A recurrent network that predicts the next byte. Shape: tokens [rows, length] -> logits [rows, length, 256]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Embedding(256, width), nn.Dropout(0.1)
        self.rnn, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.rnn(self.dropout(self.embed(tokens)))[0]))


def rows_of_text(length: int) -> TensorDataset:
    """The source of some modules as rows of `length` + 1 bytes."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / f"{name}.py").read_bytes() for name in MODULES.split())
    rows = len(text) // (length + 1)
    return TensorDataset(torch.frombuffer(bytearray(text), dtype=torch.uint8)[: rows * (length + 1)].view(rows, -1))


def main() -> None:
    """Trains from the beginning or from the newest checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="rows in a step, of all processes together")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--out", default="runs/survive")
    args = parser.parse_args()

    accelerator = Accelerator(split_batches=True, project_dir=args.out, keep=Keep(last=3))
    set_seed(0)
    model = Model(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(rows_of_text(args.length), args.batch_size, shuffle=True, num_workers=1, drop_last=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    start = accelerator.resume()
    step = start.step
    for epoch in range(start.epoch, args.epochs):
        for (rows,) in loader:
            tokens = rows.long()
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                mean = float(accelerator.reduce(loss.detach(), "mean"))
                accelerator.print(f"epoch {epoch} step {step} loss {mean.hex()} ({mean:.3f})", flush=True)
            if step % args.save_every == 0:
                accelerator.save_state(background=True)
    accelerator.wait_for_save()
    accelerator.save_model(model, f"{args.out}/model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
