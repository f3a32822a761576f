"""Learns to write Python byte by byte, from the source of Python's standard library, under any plan.

python examples/any_plan/train.py
paceline launch --procs 2 --zero 2 examples/any_plan/train.py
paceline launch --procs 4 --shard 2 --tp 2 examples/any_plan/train.py
paceline launch --procs 4 --pp 2 --recompute blocks examples/any_plan/train.py
paceline plan --procs 4 --shard auto examples/any_plan/train.py

The loop is the same for all plans: `forward_backward` replaces the forward pass, the loss and `backward`, because a
pipeline runs them together.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from model import Decoder
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, set_seed

MODULES = "argparse ast calendar configparser csv dataclasses functools heapq inspect random statistics tempfile"
HELD_OUT = ["shutil", "textwrap"]


def bytes_of(modules: list[str], length: int) -> TensorDataset:
    """The source of some modules as rows of `length` + 1 bytes, split into inputs and targets."""
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / f"{name}.py").read_bytes() for name in modules)
    rows = len(text) // (length + 1)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: rows * (length + 1)].view(rows, length + 1).long()
    return TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next byte."""
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """The mean loss on the held-out text, in bits for each byte."""
    model.eval()
    each = []
    for tokens, following in loader:
        losses = F.cross_entropy(model(tokens).transpose(1, 2).float(), following, reduction="none").mean(1)
        each.append(accelerator.gather_for_metrics(losses))
    model.train()
    return float(torch.cat(each).mean()) / math.log(2)


def main() -> None:
    """Trains, and prints the loss on the held-out text at some of the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32, help="rows in a step, whatever the plan")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--out", default="runs/any_plan")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(split_batches=True, data_seed=0, log_with="jsonl", project_dir=Path(args.out).parent)
    accelerator.init_trackers(Path(args.out).name, vars(args))  # writes metrics.jsonl into `--out`
    train = DataLoader(bytes_of(MODULES.split(), args.length), args.batch_size, shuffle=True, drop_last=True)
    test = DataLoader(bytes_of(HELD_OUT, args.length), args.batch_size)
    model = Decoder(256, args.length, args.width, args.layers, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    accelerator.print(accelerator.plan.explain())

    step, began = 0, time.perf_counter()
    while step < args.steps:
        for batch in train:
            loss = accelerator.forward_backward(model, batch, loss_of)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                mean = float(accelerator.reduce(loss, "mean"))
                accelerator.log({"loss": mean, "seconds": time.perf_counter() - began}, step)
            if step % 50 == 0:
                accelerator.print(f"step {step}: loss {mean:.4f}")
            if step == args.steps:
                break
    bits = evaluate(accelerator, model, test)
    accelerator.log({"bits": bits}, step)
    accelerator.print(f"held out: {bits:.4f} bits a byte (a byte picked at random has 8)")
    accelerator.save_model(model, f"{args.out}/model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
