"""What measuring costs: a training step of a GPT of 24 M parameters on two ranks, profiles on against off.

    python benchmarks/bench_profile.py            as Markdown
    python benchmarks/bench_profile.py --smoke    a small model and few steps: that it runs

Both runs live in the same two processes and take turns, in alternating order; what is compared is each pair. The step that
counts operations and the one that times modules are over before the first pair.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import nn
from torch.nn import functional

from paceline import Accelerator
from paceline.testing import run_ranks


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 8) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def step_of(accelerator: Accelerator, shape: tuple[int, int, int, int], rows: int):
    torch.manual_seed(0)
    model = GPT(*shape)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    tokens = torch.randint(0, shape[2], (rows, shape[3]))

    def step() -> None:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(plan: dict, chosen: str, shape: tuple[int, int, int, int], rows: int, pairs: int) -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    off = Accelerator(cpu=True, plan=plan)
    plain = step_of(off, shape, rows)
    on = Accelerator(cpu=True, plan=plan, profile=chosen)
    on.profiles.tell = lambda text: None
    measured = step_of(on, shape, rows)
    comms = on.profiles.comms
    if comms is not None:
        comms.stop()

    def seconds(run, listens: bool) -> float:
        if listens:
            comms.start()
        off.wait_for_everyone()
        begin = time.perf_counter()
        run()
        off.wait_for_everyone()
        taken = time.perf_counter() - begin
        if listens:
            comms.stop()
        return taken

    listens = comms is not None
    for _ in range(4):
        seconds(plain, False), seconds(measured, listens)
    found = []
    for number in range(pairs):
        if number % 2:
            with_it, without = seconds(measured, listens), seconds(plain, False)
        else:
            without, with_it = seconds(plain, False), seconds(measured, listens)
        found.append((without, with_it))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps of each row")
    args = parser.parse_args()
    shape, rows = ((2, 64, 256, 16), 2) if args.smoke else ((6, 512, 10_000, 64), 8)
    pairs = 4 if args.smoke else args.pairs
    print("| plan | profiles | off, ms | on, ms | median of on / off |\n|---|---|---|---|---|")
    for name, plan in (("DDP", {}), ("ZeRO-3", {"zero": 3, "shard": 2})):
        for chosen in ("wall-clock", "comms", "memory", "all"):
            found = run_ranks(work, world=2, args=(plan, chosen, shape, rows, pairs), timeout_s=1200)[0]
            without, with_it = (median(column) * 1e3 for column in zip(*found, strict=True))
            ratio = median(b / a for a, b in found)
            print(f"| {name} | {chosen} | {without:.1f} | {with_it:.1f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
