"""Ways to need less memory beside the libraries that have them, in turns: float8, 8-bit states, QLoRA; states on disk.

    python benchmarks/bench_less.py --peer PYTHON --folder /local/nvme

Markdown. PYTHON has the peers: torchao, accelerate, transformers, peft, bitsandbytes, and DeepSpeed with async_io. Paceline
runs under it as well, from its source, so that all rows have the same torch. One process, one thread; what goes to a disk is
`bench_disk.py` with two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAM = HERE / "parallel" / "less_program.py"
FROM_SOURCE = HERE.parent / "dev" / "from_source.py"
BY = {
    "fp8": ("torchao", "paceline", "accelerate", "served"),
    "adamw8bit": ("torchao", "paceline", "accelerate", "served"),
    "qlora": ("torchao", "paceline", "accelerate", "served"),
}
NAMES = {
    "torchao": "the library alone, plain PyTorch",
    "paceline": "Paceline",
    "accelerate": "accelerate",
    "served": "the same script, by Paceline",
}
SKIPPED = 2  # the steps that make states and buffers


def run(python: str, what: str, by: str, arguments: list[str], timeout_s: float) -> dict | str:
    """Returns what a run has printed, or why it printed nothing."""
    command = [python, str(FROM_SOURCE)] if by in ("paceline", "served") else [python]
    command += [str(PROGRAM), "--what", what, "--by", by, *arguments]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["OMP_NUM_THREADS"] = "1"
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no result within {timeout_s:g} s"
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    return (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--folder", default=None, help="on the disk that is measured; not given: no disk")
    parser.add_argument("--what", nargs="+", choices=BY, default=list(BY))
    parser.add_argument("--rounds", type=int, default=2, help="how often each runs, in turns")
    parser.add_argument("--timeout", type=float, default=150)
    options, arguments = parser.parse_known_args()
    load = os.getloadavg()[0]
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, load {load:.1f}, {' '.join(arguments)}\n")
    for what in options.what:
        print(f"**{what}**\n\n| | s a step | CPU s | MiB at rest | MiB at the peak | losses, first and last |")
        print("|---|---|---|---|---|---|")
        found: dict[str, list[dict]] = {by: [] for by in BY[what]}
        why: dict[str, str] = {}
        for _ in range(options.rounds):
            for by in BY[what]:
                if by in why:
                    continue
                outcome = run(options.peer, what, by, arguments, options.timeout)
                if isinstance(outcome, str):
                    why[by] = outcome
                else:
                    found[by].append(outcome)
        for by, rows in found.items():
            if not rows:
                print(f"| {NAMES[by]} | | | | | {why[by]} |")
                continue
            seconds = min(statistics.median(row["seconds"][SKIPPED:]) for row in rows)
            cpu = min(statistics.median(row["cpu"][SKIPPED:]) for row in rows)
            rest, peak = (rows[0][name] / 2**20 for name in ("rest", "peak"))
            losses = f"{rows[0]['losses'][0]:.7f} {rows[0]['losses'][-1]:.7f}"
            print(f"| {NAMES[by]} | {seconds:.3f} | {cpu:.3f} | {rest:.1f} | {peak:.1f} | {losses} |")
        print(flush=True)
    if options.folder is not None:
        disk = [sys.executable, str(HERE / "bench_disk.py"), "--peer", options.peer, "--folder", options.folder]
        subprocess.run([*disk, "--width", "512", "--layers", "8"], check=True)
    print(f"\nload at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
