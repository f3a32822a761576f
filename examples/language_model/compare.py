"""Runs `train.py` on one process and on two, with the same global batch, and prints both results side by side.

python examples/language_model/compare.py                     further arguments are passed to train.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
OUT = Path("runs/language_model")


def run(procs: int, arguments: list[str]) -> list[dict]:
    """Returns what a run has logged. Each process has one thread, as it would have one GPU."""
    out = OUT.with_name(f"language_model_{procs}")
    (out / "metrics.jsonl").unlink(missing_ok=True)
    launch = ["-m", "paceline", "launch", "--procs", str(procs), "--threads", "1"]
    done = subprocess.run([sys.executable, *launch, TRAIN, "--out", out, *arguments], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(done.returncode)  # the failed command has printed its error
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "log"]


def main() -> None:
    """Prints a table."""
    one, two = (run(procs, sys.argv[1:]) for procs in (1, 2))
    rows = [
        (first["step"], first["values"]["loss"], second["values"]["loss"])
        for first, second in zip(one, two, strict=True)
        if "loss" in first["values"]
    ]
    print("step   1 process  2 processes  difference")
    for step, first, second in rows[:: max(1, len(rows) // 10)]:
        print(f"{step:4}  {first:10.5f}  {second:11.5f}  {abs(first - second):10.1e}")
    perplexity = [run[-1]["values"]["perplexity"] for run in (one, two)]
    rate = [[line for line in run if "loss" in line["values"]][-1]["values"]["tokens_per_s"] for run in (one, two)]
    print(f"perplexity, held out    {perplexity[0]:.3f} and {perplexity[1]:.3f}")
    print(f"tokens a second         {rate[0]:,.0f} and {rate[1]:,.0f}: {rate[1] / rate[0]:.2f} times as many")


if __name__ == "__main__":
    main()
