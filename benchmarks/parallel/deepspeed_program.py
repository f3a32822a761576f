"""A training script as DeepSpeed's users write it: it runs under the real one and, unchanged, where its names are served.

deepspeed_program.py --once      prints the time of day when its first step is done, and ends
deepspeed_program.py --on-call   does a step for each line that it reads, and prints that step's seconds
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import deepspeed
import torch
import torch.distributed as dist
from model import gpt, loss_of, tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--size", default="24M")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--torch-adam", action="store_true")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--on-call", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    model = gpt(options.size)
    biggest = sum(parameter.numel() for parameter in model.parameters())  # no bucket is larger than the model
    zero = {"stage": options.stage, "reduce_bucket_size": biggest, "allgather_bucket_size": biggest}
    if options.stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1 << 20}
    config = {
        "train_micro_batch_size_per_gpu": options.rows,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": options.torch_adam}},
        "zero_optimization": zero,
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    drawn = tokens(options.rows, options.length, dist.get_rank())
    inputs, targets = drawn[:, :-1], drawn[:, 1:]

    def step() -> float:
        dist.barrier()
        begun = time.perf_counter()
        engine.backward(loss_of(engine(inputs), targets))
        engine.step()
        return time.perf_counter() - begun

    if options.once:
        step()
        if dist.get_rank() == 0:
            os.write(1, f"first step done at {time.time()}\n".encode())
    for _ in range(options.steps):
        step()
    for _ in sys.stdin if options.on_call else ():
        os.write(1, f"step took {step()}\n".encode())


if __name__ == "__main__":
    main()
