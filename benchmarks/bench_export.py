"""Export of a model from 2 ranks: time, and the most memory that it takes on a rank, row by row and gathered.

    python benchmarks/bench_export.py [MEGABYTES]

For each plan, in processes of their own: `save_model`, and for comparison what it replaced, the whole state gathered on every
rank and written by the first one. Files are written to a temporary folder, on whatever disk that is.
"""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from paceline import Accelerator
from paceline.checkpoint import save_model
from paceline.testing import run_ranks

# The C library keeps freed memory unless it is told, at the start of a process, to give it back.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2"}
PLANS = [{"shard": 2}, {"pp": 2}, {"replicate": 2}]


class Net(nn.Module):
    """Square layers, and two thousand small ones."""

    def __init__(self, megabytes: int, small: int = 0) -> None:
        super().__init__()
        side = 1024
        self.layers = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(max(megabytes // 4, 2)))
        self.small = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(small))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + sum(each.sum() for each in self.small) if len(self.small) else x


def resident() -> int:
    """Bytes of this process's own: the pages of mapped files left out."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def watched(work):
    """Seconds that `work` takes, and how far memory rises above where it was."""
    before = most = resident()
    done = threading.Event()

    def look():
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident())

    watcher = threading.Thread(target=look)
    watcher.start()
    start = time.perf_counter()
    work()
    taken = time.perf_counter() - start
    done.set()
    watcher.join()
    return taken, most - before


def measure(plan, megabytes, small, folder, gathered):
    accelerator = Accelerator(cpu=True, plan=plan)
    model = accelerator.prepare(Net(megabytes, small))

    def stream():
        accelerator.save_model(model, folder, "200MB")

    def gather():
        state = accelerator.get_state_dict(model)
        accelerator.states.on_main(lambda: save_model(model, folder, "200MB", state_dict=state))

    work = gather if gathered else stream
    work()  # files are there, code is loaded
    accelerator.wait_for_everyone()
    return min(watched(work) for _ in range(3))


def main():
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 800
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, 2 ranks over gloo, files of 200 MB")
    for plan in PLANS:
        for size, small in ((megabytes, 0), (8, 2000)):
            if small and "pp" in plan:
                continue  # two layers are no pipeline
            for gathered in (True, False):
                with tempfile.TemporaryDirectory(prefix="export-") as folder:
                    found = run_ranks(measure, world=2, args=(plan, size, small, folder, gathered), timeout_s=300)
                seconds = max(taken for taken, _ in found)
                extra = ", ".join(f"{most / 1e6:.0f}" for _, most in found)
                way = "gathered" if gathered else "row by row"
                print(
                    f"{plan!s:18} {size:5} MB + {small:4} small  {way:10}  {seconds:6.2f} s   above: {extra} MB a rank",
                    flush=True,
                )


if __name__ == "__main__":
    if not GIVES_BACK.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **GIVES_BACK})
    main()
