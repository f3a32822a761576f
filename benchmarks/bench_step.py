"""What Paceline adds to a training step: against plain PyTorch, and against hand-written DDP and all_gather.

    python benchmarks/bench_step.py            all rows, as Markdown
    python benchmarks/bench_step.py --peers    also accelerate and Lightning Fabric where they are installed

The peer runs in the same process, in turns with ours; on two ranks both loops run on the same two processes. All times are
CPU time (user and system), which other processes disturb less.
"""

from __future__ import annotations

import argparse
import importlib.util
import time

import torch
import torch.distributed as dist
from timing import Result, pairs, seconds
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline import Accelerator
from paceline.testing import run_ranks


class Samples(Dataset):
    """Document 001's data set: random features, random classes; read one sample at a time."""

    def __init__(self, samples: int) -> None:
        self.x, self.y = torch.randn(samples, 10), torch.randint(0, 5, (samples,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def parts(samples: int, batch: int, fused: bool | None = None):
    torch.manual_seed(0)
    model = nn.Linear(10, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    return model, optimizer, DataLoader(Samples(samples), batch, shuffle=True)


def plain_loop(model, optimizer, loader, gather=None):
    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            pred = model(x)
            loss = nn.functional.cross_entropy(pred, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if gather is not None:
                gather((pred.detach(), y, loss.detach()))

    return epoch


def wrapped_loop(accelerator, model, optimizer, loader, clip, gather=None):
    def epoch() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            pred = model(x)
            loss = nn.functional.cross_entropy(pred, y)
            accelerator.backward(loss)
            clip(model, optimizer)
            optimizer.step()
            if gather is not None:
                gather((pred.detach(), y, loss.detach()))

    return epoch


def ours(samples: int, batch: int, gather: bool = False, fused: bool | None = None):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(samples, batch, fused))
    clip = lambda m, o: accelerator.clip_grad_norm_(m.parameters(), 1.0)  # noqa: E731
    return wrapped_loop(accelerator, model, optimizer, loader, clip, accelerator.gather_for_metrics if gather else None)


def one_process(make_peer, turns: int, fused: bool | None = None) -> Result:
    samples, batch = 10_000, 100
    candidate, peer = ours(samples, batch, fused=fused), make_peer(samples, batch)
    units = samples // batch
    clock = time.process_time
    return pairs(lambda: seconds(candidate, units, clock), lambda: seconds(peer, units, clock), turns)


def peer_plain(samples: int, batch: int):
    return plain_loop(*parts(samples, batch))


def peer_plain_fused(samples: int, batch: int):
    return plain_loop(*parts(samples, batch, fused=True))


def peer_accelerate(samples: int, batch: int):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(samples, batch))
    clip = lambda m, o: accelerator.clip_grad_norm_(m.parameters(), 1.0)  # noqa: E731
    return wrapped_loop(accelerator, model, optimizer, loader, clip)


def peer_fabric(samples: int, batch: int):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader = parts(samples, batch)
    model, optimizer = fabric.setup(model, optimizer)
    clip = lambda m, o: fabric.clip_gradients(m, o, max_norm=1.0)  # noqa: E731
    return wrapped_loop(fabric, model, optimizer, fabric.setup_dataloaders(loader), clip)


def all_gathers(values):
    """What one writes by hand: an all_gather and a concatenation for each tensor."""
    found = []
    for value in values:
        value = value.reshape(1) if value.dim() == 0 else value.contiguous()
        out = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(out, value)
        found.append(torch.cat(out))
    return tuple(found)


def _turns(candidate, peer, units: int, turns: int) -> Result | None:
    """On several ranks: a barrier before each measurement; rank 0's CPU times count, of all its threads."""

    def measured(work):
        def run() -> float:
            dist.barrier()
            return seconds(work, units, time.process_time)

        return run

    return pairs(measured(candidate), measured(peer), turns)


def gather_rank(turns: int) -> Result | None:
    torch.set_num_threads(1)
    samples, batch = 10_000, 50
    candidate = ours(samples, batch, gather=True)
    model, optimizer, _ = parts(samples, batch)
    data = Samples(samples)
    sampler = torch.utils.data.DistributedSampler(data)
    peer = plain_loop(DistributedDataParallel(model), optimizer, DataLoader(data, batch, sampler=sampler), all_gathers)
    return _turns(candidate, peer, samples // batch // 2, turns)


def gather_rank_accelerate(turns: int) -> Result | None:
    """The same two loops with accelerate as the peer."""
    import accelerate

    torch.set_num_threads(1)
    samples, batch = 10_000, 50
    candidate = ours(samples, batch, gather=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts(samples, batch))
    clip = lambda m, o: accelerator.clip_grad_norm_(m.parameters(), 1.0)  # noqa: E731
    peer = wrapped_loop(accelerator, model, optimizer, loader, clip, accelerator.gather_for_metrics)
    return _turns(candidate, peer, samples // batch // 2, turns)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(16, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 8))


def encoder_rank(turns: int) -> Result | None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(320, 32, 16), torch.randint(0, 8, (320, 32)))

    def loop(model, optimizer, loader, backward):
        def epoch() -> None:
            for x, y in loader:
                optimizer.zero_grad()
                backward(nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
                optimizer.step()

        return epoch

    accelerator = Accelerator(cpu=True)
    model = encoder()
    prepared = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), DataLoader(data, 8))
    candidate = loop(*prepared, accelerator.backward)
    model = DistributedDataParallel(encoder(), gradient_as_bucket_view=True)
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    by_hand = (model, torch.optim.AdamW(model.parameters(), fused=True), DataLoader(data, 8, sampler=sampler))
    peer = loop(*by_hand, torch.Tensor.backward)
    return _turns(candidate, peer, 320 // 16, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    # Two ranks first: they are forked, and this process must not have started autograd's threads.
    gather = run_ranks(gather_rank, world=2, args=(options.turns,), timeout_s=300)[0]
    theirs = None
    if options.peers and importlib.util.find_spec("accelerate"):
        theirs = run_ranks(gather_rank_accelerate, world=2, args=(options.turns,), timeout_s=300)[0]
    small = run_ranks(encoder_rank, world=2, args=(options.turns,), timeout_s=300)[0]
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, {options.turns} turns, medians (quartiles)\n")
    print("| what | Paceline | peer | ratio | must reach |\n| --- | --- | --- | --- | --- |")
    print(one_process(peer_plain, options.turns).row("step of Linear(10,5)", "plain PyTorch", "<= 1.05"))
    print(
        one_process(peer_plain_fused, options.turns, True).row("the same, both with fused AdamW", "plain PyTorch", "-")
    )
    print(gather.row("the same on 2 ranks with gather_for_metrics", "DDP and all_gather by hand", "<= 1.10"))
    if theirs is not None:
        print(theirs.row("the same on 2 ranks with gather_for_metrics", "accelerate", "-"))
    print(small.row("small encoder on 2 ranks", "DDP by hand", "<= 1.01"))
    if options.peers:
        for module, make in (("accelerate", peer_accelerate), ("lightning_fabric", peer_fabric)):
            if importlib.util.find_spec(module):
                print(one_process(make, options.turns).row("step of Linear(10,5)", module, "-"))


if __name__ == "__main__":
    main()
