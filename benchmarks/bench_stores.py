"""Saving to and loading from an S3 server on this machine: Paceline's store beside torch's FsspecWriter and FsspecReader.

    python benchmarks/bench_stores.py [--megabytes 256] [--turns 5]

One process, one state, turns taken in alternation. Paceline's load reads every file twice, to verify it before anything is
touched; torch's verifies nothing. The server (moto) shares the processor with what is measured: compare within a run only.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from paceline.checkpoint import Checkpointer, TrainState
from paceline_hosts.stores.objects import filesystem

WIDTH = 2048  # a layer has 16.8 MB


@contextmanager
def server() -> Iterator[None]:
    """moto's server, and the environment that leads to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(endpoint, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        yield
    finally:
        running.kill()
        running.wait()


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, options.megabytes // 17))))
    size = sum(each.nbytes for each in model.parameters()) / 1e6
    saver, state = Checkpointer(), TrainState(models={"model": model})
    into = {name: torch.empty_like(value) for name, value in model.state_dict().items()}
    work: dict[str, Callable[[], object]] = {
        "save, Paceline": lambda: saver.save("s3://bucket/ours", state),
        "save, FsspecWriter": lambda: dcp.save(model.state_dict(), storage_writer=FsspecWriter("s3://bucket/theirs")),
        "load, Paceline": lambda: saver.load("s3://bucket/ours", state),
        "load, FsspecReader": lambda: dcp.load(into, storage_reader=FsspecReader("s3://bucket/theirs")),
    }
    with server():
        filesystem("s3://").mkdir("bucket")
        for each in work.values():
            each()
        seconds: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(options.turns):
            for name, each in work.items():
                seconds[name].append(timed(each))
    print(f"| {size:.0f} MB, median of {options.turns} | s | MB/s | least to most |\n|---|---|---|---|")
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"| {name} | {middle:.2f} | {size / middle:.0f} | {min(taken):.2f} to {max(taken):.2f} |")


if __name__ == "__main__":
    main()
