"""A training run to be disturbed: it saves often, resumes by itself, and each process writes down what it does.

The run ends once there is a file `enough` in its folder, or after --steps.
"""

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, set_seed

begun = time.time()
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--pause-s", type=float, default=0.03, help="makes each step longer")
parser.add_argument("--batch-size", type=int, help="of each process, where it is not 12 for all of them together")
options = parser.parse_args()

set_seed(0)
accelerator = Accelerator(split_batches=not options.batch_size, project_dir=options.folder, total_limit=3)
inputs = torch.randn(360, 16)
targets = inputs.square().sum(1, keepdim=True).sqrt()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=options.batch_size or 12, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start = accelerator.resume()

step, world = start.step, accelerator.num_processes
me = {
    "host": socket.gethostname(),
    "pid": os.getpid(),
    "rank": accelerator.process_index,
    "world": world,
    "begun": begun,
}
log = (options.folder / f"{me['host']}.jsonl").open("a", buffering=1)
for _ in range(start.epoch, 10**9):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean, batch = accelerator.reduce(torch.stack([loss.detach() / world, torch.tensor(float(len(x)))])).tolist()
        log.write(json.dumps({**me, "step": step, "loss": mean, "batch": batch, "time": time.time()}) + "\n")
        if step % options.save_every == 0:
            accelerator.save_state()
        if step >= options.steps or (options.folder / "enough").exists():
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.end_training()
            sys.exit()
        time.sleep(options.pause_s)
