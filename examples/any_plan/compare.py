"""Runs `train.py` under one plan after another and prints the losses side by side.

python examples/any_plan/compare.py                 further arguments are passed to train.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
PLANS = {
    "one process": "",
    "replicate 2": "--procs 2",
    "zero 1 on 2": "--procs 2 --zero 1",
    "zero 2 on 2": "--procs 2 --zero 2",
    "shard 2": "--procs 2 --shard 2",
    "tensor 2": "--procs 2 --tp 2",
    "pipeline 2": "--procs 2 --pp 2",
    "context 2": "--procs 2 --cp 2",
    "shard 2 x tensor 2": "--procs 4 --shard 2 --tp 2",
    "pipeline 2 x shard 2, recompute": "--procs 4 --pp 2 --shard 2 --recompute blocks",
}


def run(name: str, flags: str, arguments: list[str]) -> list[dict]:
    """Returns what a run has logged. Each process has one thread, as it would have one GPU."""
    out = Path("runs/any_plan") / name.replace(" ", "_").replace(",", "")
    (out / "metrics.jsonl").unlink(missing_ok=True)
    launch = [sys.executable, "-m", "paceline", "launch", "--threads", "1", *flags.split()]
    done = subprocess.run([*launch, TRAIN, "--out", out, *arguments], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(done.returncode)  # the failed command has printed its error
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "log"]


def main() -> None:
    """Prints a table."""
    first: dict[int, float] = {}
    print(f"{'plan':32}  {'loss at 10':>10}  {'at the end':>10}  {'difference at 10':>16}  {'bits, held out':>14}")
    for name, flags in PLANS.items():
        logged = run(name, flags, sys.argv[1:])
        losses = {line["step"]: line["values"]["loss"] for line in logged if "loss" in line["values"]}
        first = first or losses
        last, gap = losses[max(losses)], abs(losses[10] - first[10])
        print(f"{name:32}  {losses[10]:10.6f}  {last:10.6f}  {gap:16.1e}  {logged[-1]['values']['bits']:14.4f}")


if __name__ == "__main__":
    main()
