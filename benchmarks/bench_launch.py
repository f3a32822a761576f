"""What it costs to start: two processes that do one all-reduce, against torchrun; `paceline launch --help`.

python benchmarks/bench_launch.py [--turns 5]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import pairs

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert int(total) == 2
dist.destroy_process_group()
"""
BIN = Path(sys.executable).parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
# Users keep compiled modules.
ENV.pop("PYTHONDONTWRITEBYTECODE", None)


def wall_seconds(*command: object) -> float:
    """Seconds from the command to its end."""
    begun = time.perf_counter()
    subprocess.run([str(word) for word in command], check=True, env=ENV, capture_output=True)
    return time.perf_counter() - begun


def cpu_seconds(*command: object) -> float:
    """User and system seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall_seconds(*command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "all_reduce.py"
        script.write_text(SCRIPT)
        found = pairs(
            lambda: wall_seconds(BIN / "paceline", "launch", "--procs", 2, script),
            lambda: wall_seconds(BIN / "torchrun", "--standalone", "--nproc-per-node", 2, script),
            turns,
        )
    shown = statistics.median(cpu_seconds(BIN / "paceline", "launch", "--help") for _ in range(turns))
    print("| what | Paceline | peer | ratio | must reach |\n| --- | --- | --- | --- | --- |")
    print(
        f"| start 2 processes, one all-reduce | {found.candidate_s:.2f} s | torchrun {found.peer_s:.2f} s "
        f"| {found.ratio:.2f} ({found.low:.2f} .. {found.high:.2f}) | <= 0.60 |"
    )
    print(f"| `paceline launch --help`, CPU | {shown:.3f} s | - | - | <= 0.15 s |")


if __name__ == "__main__":
    main()
