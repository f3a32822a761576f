"""A DeepSpeed script whose states and parameters are on disk; it runs under the real one and where its names are served.

Each rank prints one line of JSON: losses, seconds and CPU seconds of each step, and the most memory that it held meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import threading
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

MIB = 2**20


class SampledMemory:
    """The most memory of this process that the system cannot take back (anonymous), and that of files, sampled each 2 ms."""

    def __init__(self) -> None:
        self.anonymous = 0
        self.of_files = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            anonymous, of_files = resident()
            self.anonymous = max(self.anonymous, anonymous)
            self.of_files = max(self.of_files, of_files)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def resident() -> tuple[int, int]:
    """Bytes of anonymous memory (shared memory too), and of mapped files."""
    text = Path("/proc/self/status").read_text()
    values = {name: int(size) * 1024 for name, size in re.findall(r"(Rss\w+):\s+(\d+) kB", text)}
    return values["RssAnon"] + values["RssShmem"], values["RssFile"]


def on_disk(folder: str) -> int:
    """Bytes in files of a folder, those without names too that this process has open."""
    sizes: dict[int, int] = {}
    for path in Path(folder).rglob("*"):
        if path.is_file():
            sizes[path.stat().st_ino] = path.stat().st_size
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith(folder):
                sizes[entry.stat().st_ino] = entry.stat().st_size
        except OSError:
            pass  # the descriptor of the listing itself
    return sum(sizes.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=("memory", "optimizer", "all"), required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = []
    for _ in range(options.layers):
        layers += [nn.Sequential(nn.Linear(options.width, options.width), nn.Tanh())]
    model = nn.Sequential(*layers)
    disk = {"device": "nvme", "nvme_path": options.folder, "pin_memory": False}
    zero: dict = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": options.width**2}
    if options.what != "memory":
        zero["offload_optimizer"] = {**disk, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    if options.what == "all":
        zero["offload_param"] = {**disk, "buffer_count": 5, "buffer_size": 2 * options.width**2, "max_in_cpu": 0}
    adam: dict = {"lr": 1e-3, "weight_decay": 0.01}
    if options.what == "memory":
        adam["torch_adam"] = True  # DeepSpeed's own would be compiled first
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero,
        "bf16": {"enabled": options.bf16},
    }
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    del model, layers
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    x = torch.randn(8, options.width, generator=torch.Generator().manual_seed(rank)).to(dtype)
    losses: list[float] = []
    seconds: list[float] = []
    cpu: list[float] = []
    peak: SampledMemory | None = None
    for number in range(options.steps):
        if number == 2:  # states and buffers are there
            ctypes.CDLL(None).malloc_trim(0)  # what the whole model has left behind
            peak = SampledMemory()
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = (engine(x).float() - x.float().roll(1, 1)).square().mean()
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - cpu_began)
        losses.append(loss.item())
    assert peak is not None
    peak.end()
    row = {
        "rank": rank, "losses": losses, "seconds": seconds, "cpu": cpu, "anonymous": peak.anonymous // MIB,
        "of_files": peak.of_files // MIB, "on_disk": on_disk(options.folder) // MIB,
    }  # fmt: skip
    os.write(1, f"RESULT {json.dumps(row)}\n".encode())
    dist.barrier()


if __name__ == "__main__":
    main()
