"""Saving and loading a state of about a gigabyte on two ranks: the loop's stall, the whole save, the load.

    python benchmarks/bench_checkpoint.py            all rows, as Markdown
    python benchmarks/bench_checkpoint.py --peers    also accelerate's save_state, where it is installed

The state is that of a stack of linear layers and AdamW under DistributedDataParallel. Ours is on the disk when the save
ends (fsync of every file and folder, a checksum each); torch.save and accelerate leave theirs to the page cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from timing import Result, pairs
from torch import nn

from paceline import Accelerator
from paceline.testing import run_ranks

WIDTH = 2304  # a layer has 5.3 million parameters


def model(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def step(prepared, optimizer, backward, width: int) -> None:
    optimizer.zero_grad()
    backward(prepared(torch.ones(1, width)).square().mean())
    optimizer.step()


def together(work: Callable[[], object]) -> Callable[[], float]:
    """Seconds from a barrier until all ranks have done the work."""

    def measured() -> float:
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        return time.perf_counter() - start

    return measured


def ours(layers: int, width: int, folder: str):
    accelerator = Accelerator(cpu=True, project_dir=folder)
    net = model(layers, width)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
    step(net, optimizer, accelerator.backward, width)
    return accelerator, net, optimizer


def forget(path: str) -> None:
    """Has the system forget what it holds of a folder's files, so that the next reader goes to the disk."""
    for each in Path(path).iterdir():
        number = os.open(each, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def flush(path: str) -> None:
    """Has the disk take a folder's files."""
    for each in Path(path).iterdir():
        number = os.open(each, os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def background_rank(folder: str, layers: int, width: int, turns: int) -> tuple[Result, float, Result]:
    """The stall against one torch.save; the first stall, on memory that is new; steps during the write against steps."""
    torch.set_num_threads(1)
    accelerator, net, optimizer = ours(layers, width, folder)
    path = f"{folder}/c"
    during: list[float] = []
    quiet: list[float] = []

    def steps(into: list[float], count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            step(net, optimizer, accelerator.backward, width)
            into.append(time.perf_counter() - start)

    stall = together(lambda: accelerator.save_state(path, background=True))

    def save() -> float:
        seconds = stall()
        while accelerator.reduce(torch.tensor(float(accelerator.states._checkpointer.busy()))) > 0:
            steps(during, 1)
        accelerator.wait_for_save()
        steps(quiet, 4)
        return seconds

    def plain() -> None:
        if accelerator.is_main_process:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/plain.pt")

    first = save()
    result = pairs(save, together(plain), turns)
    slowed = sorted(one / statistics.median(quiet) for one in during)
    quarter = len(slowed) // 4
    slow = Result(
        statistics.median(during),
        statistics.median(quiet),
        statistics.median(slowed),
        slowed[quarter],
        slowed[-1 - quarter],
    )
    accelerator.end_training()
    return result, first, slow


def load_rank(folder: str, layers: int, width: int, turns: int, cold: bool) -> Result:
    """A load until it is ready, against reading the files into memory; both ranks need every byte of them."""
    torch.set_num_threads(1)
    accelerator, _, _ = ours(layers, width, folder)
    path = f"{folder}/c"
    accelerator.save_state(path)

    def read() -> None:
        kept = [each.read_bytes() for each in sorted(Path(path).iterdir())]
        del kept

    def prepared(work: Callable[[], object]) -> Callable[[], float]:
        def measured() -> float:
            if cold and accelerator.is_main_process:
                forget(path)
            return together(work)()

        return measured

    result = pairs(prepared(lambda: accelerator.load_state(path)), prepared(read), turns)
    accelerator.end_training()
    return result


def whole_rank(folder: str, layers: int, width: int, turns: int, fresh: bool, durable: bool) -> Result:
    """A whole save against accelerate's, each of its own model; into a fresh folder, or over the save before it.

    With `durable`, accelerate's files are flushed to the disk too, as ours are.
    """
    import accelerate

    torch.set_num_threads(1)
    accelerator, _, _ = ours(layers, width, folder)
    peer = accelerate.Accelerator(cpu=True)
    net = model(layers, width)
    net, optimizer = peer.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
    step(net, optimizer, peer.backward, width)

    def saved(work: Callable[[str], object], name: str) -> Callable[[], float]:
        place = f"{folder}/{name}"

        def measured() -> float:
            if fresh and accelerator.is_main_process:
                shutil.rmtree(place, ignore_errors=True)
            return together(lambda: work(place))()

        return measured

    def peer_save(place: str) -> None:
        peer.save_state(place)
        if durable and accelerator.is_main_process:
            flush(place)

    result = pairs(saved(accelerator.save_state, "c"), saved(peer_save, "peer"), turns)
    accelerator.end_training()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--layers", type=int, default=16, help="of 64 MB of state each")
    parser.add_argument("--folder", help="where to save; a folder for temporary files by default")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.folder)

    def ranks(work: Callable, *args):
        try:
            return run_ranks(work, world=2, args=(folder, *args), timeout_s=1200)[0]
        finally:
            for name in os.listdir(folder):
                place = os.path.join(folder, name)
                shutil.rmtree(place) if os.path.isdir(place) else os.remove(place)

    large, small = (options.layers, WIDTH), (1000, 16)
    print(f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {options.turns} turns, medians (quartiles)")
    size = options.layers * (WIDTH + 1) * WIDTH * 12 / 1e9
    print(f"\nState: {size:.2f} GB on 2 ranks; small: 2,000 parameters, {8000} tensors\n")
    print("| what | Paceline | peer | ratio | must reach |\n| --- | --- | --- | --- | --- |", flush=True)
    stall, first, slow = ranks(background_rank, *large, options.turns)
    print(stall.row("stall of a save in the background", "torch.save", "<= 0.10"))
    print(f"| the first one, on new memory | {first * 1e3:.0f} ms | | {first / stall.peer_s:.3f} | - |")
    print(slow.row("a step while it is being written", "a step", "-"), flush=True)
    stall, first, _ = ranks(background_rank, *small, options.turns)
    print(stall.row("stall, small parameters", "torch.save", "-"), flush=True)
    print(ranks(load_rank, *large, options.turns, False).row("load, files in the page cache", "reading", "<= 1.20"))
    print(
        ranks(load_rank, *large, options.turns, True).row("load, files on the disk", "reading", "<= 1.20"), flush=True
    )
    print(ranks(load_rank, *small, options.turns, False).row("load, small parameters", "reading", "-"), flush=True)
    if options.peers and importlib.util.find_spec("accelerate"):
        rows = [
            ("a whole save, accelerate's flushed too", large, True, True, "<= 0.67"),
            ("a whole save, accelerate's left to the cache", large, True, False, "<= 0.67"),
            ("a whole save over an older one", large, False, False, "-"),
            ("a whole save, small parameters", small, True, False, "-"),
        ]
        for title, size, fresh, durable, wanted in rows:
            print(ranks(whole_rank, *size, options.turns, fresh, durable).row(title, "accelerate", wanted), flush=True)
    os.rmdir(folder)


if __name__ == "__main__":
    main()
