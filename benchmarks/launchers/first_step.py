"""A plain DDP script that takes one step and writes down when that was: python first_step.py FILE, under any launcher."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    with open(f"{sys.argv[1]}.{os.getpid()}", "w") as file:
        file.write(str(time.time()))
    os.rename(file.name, sys.argv[1])
dist.destroy_process_group()
