"""What looking for anomalies and `log_system` cost: a training step of a GPT of 24 M parameters on two ranks, on against off.

    python benchmarks/bench_anomalies.py            as Markdown
    python benchmarks/bench_anomalies.py --smoke    a small model and few steps: that it runs

Both runs live in the same two processes and take turns, in alternating order; what is compared is each pair. The last row has a
model of almost nothing, so that the difference is what a step pays at least.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from bench_profile import GPT
from torch.nn import functional

from paceline import Accelerator
from paceline.testing import run_ranks
from paceline_lens.observe import system_values

ANOMALIES = {"nan": "skip", "loss_spike": "skip", "gradient_norm": "skip"}
MODES: dict[str, dict[str, Any]] = {"anomalies": {"anomalies": ANOMALIES}, "log_system": {"log_system": True}}


class Silent:
    """A tracker that writes nothing."""

    name = "silent"

    def start(self, run: str, config: object) -> None: ...

    def log(self, values: object, step: int | None) -> None: ...

    def finish(self, status: str) -> None: ...


def step_of(accelerator: Accelerator, shape: tuple[int, int, int, int], rows: int, clips: bool) -> Any:
    accelerator.init_trackers("bench")
    torch.manual_seed(0)
    model = GPT(*shape)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    tokens = torch.randint(0, shape[2], (rows, shape[3]))

    def step() -> None:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        accelerator.backward(loss)
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"step": 1})

    return step


def work(plan: dict, chosen: str, clips: bool, shape: Any, rows: int, pairs: int) -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    system_values.peak_flops_of = lambda model, precision: 1e12
    off = Accelerator(cpu=True, plan=plan, log_with=Silent())
    on = Accelerator(cpu=True, plan=plan, log_with=Silent(), **MODES[chosen])
    plain, measured = step_of(off, shape, rows, clips), step_of(on, shape, rows, clips)

    def seconds(run: Any) -> float:
        off.wait_for_everyone()
        begin = time.perf_counter()
        run()
        off.wait_for_everyone()
        return time.perf_counter() - begin

    for _ in range(4):
        seconds(plain), seconds(measured)
    times = []
    for number in range(pairs):
        if number % 2:
            with_it, without = seconds(measured), seconds(plain)
        else:
            without, with_it = seconds(plain), seconds(measured)
        times.append((without, with_it))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps of each row")
    args = parser.parse_args()
    small = (2, 64, 256, 16), 2
    large = small if args.smoke else ((6, 512, 10_000, 64), 8)
    pairs = 4 if args.smoke else args.pairs
    print("| plan | what is on | off, ms | on, ms | median of on / off |\n|---|---|---|---|---|")
    for name, plan, (shape, rows), factor in (
        ("DDP", {}, large, 1),
        ("ZeRO-3", {"zero": 3, "shard": 2}, large, 1),
        ("DDP, tiny model", {}, small, 5),
    ):
        for chosen, clips in (("anomalies", True), ("anomalies", False), ("log_system", True)):
            times = run_ranks(work, world=2, args=(plan, chosen, clips, shape, rows, factor * pairs), timeout_s=1200)[0]
            without, with_it = (median(column) * 1e3 for column in zip(*times, strict=True))
            ratio = median(b / a for a, b in times)
            what = chosen if clips else f"{chosen}, no clipping"
            print(f"| {name} | {what} | {without:.1f} | {with_it:.1f} | {ratio:.3f} |", flush=True)


if __name__ == "__main__":
    main()
