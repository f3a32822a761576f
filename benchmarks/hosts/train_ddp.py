"""A plain DDP script as torchrun's users write it: resumes from the last `torch.save`, saves every five steps.

Each process writes down its steps in FOLDER/HOST.jsonl; the run ends once there is a file FOLDER/enough.
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

begun = time.time()
folder, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
if timeout_s:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
else:
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(360, 16)
dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step, epoch, saved = 0, 0, folder / "last.pt"
if saved.exists():
    state = torch.load(saved)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step, epoch = state["step"], state["epoch"]

me = {"host": socket.gethostname(), "pid": os.getpid(), "rank": rank, "world": world, "begun": begun}
log = (folder / f"{me['host']}.jsonl").open("a", buffering=1)
while True:
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        told = torch.tensor([loss.item() / world, float(len(x)), float((folder / "enough").exists())])
        dist.all_reduce(told)
        mean, batch, enough = told.tolist()
        log.write(json.dumps({**me, "step": step, "loss": mean, "batch": batch, "time": time.time()}) + "\n")
        if rank == 0 and step % 5 == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step, "epoch": epoch}, folder / "last.tmp")
            os.replace(folder / "last.tmp", saved)
        if enough:
            dist.destroy_process_group()
            sys.exit()
        time.sleep(0.03)
    epoch += 1
