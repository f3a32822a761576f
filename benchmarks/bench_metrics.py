"""`gather_for_metrics` on one process: time of one call in the middle of an epoch, accelerate's beside ours.

    python benchmarks/bench_metrics.py --peer /path/to/python     (an environment with the real accelerate)

Each process measures 2000 calls, five times, and the best counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

CALLS, TRIALS = 2000, 5


def measure(kind: str) -> float:
    """Microseconds of one call, by the library of that name."""
    if kind == "door":
        from paceline.compat import install

        install(["accelerate"])
    import torch
    from torch.utils.data import DataLoader

    if kind == "native":
        from paceline import Accelerator
    else:
        from accelerate import Accelerator
    accelerator: Any = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(64.0).view(16, 4), batch_size=4))
    best = float("inf")
    for batch in loader:
        values = (batch, batch.argmax(dim=1))
        for _ in range(TRIALS):
            start = time.perf_counter()
            for _ in range(CALLS):
                accelerator.gather_for_metrics(values)
            best = min(best, (time.perf_counter() - start) / CALLS)
        break
    return best * 1e6


def main() -> None:
    """Measures ours, through the door and natively, and the peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=sys.executable, help="Python of the environment with the real accelerate")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measure(options.kind)))
        return
    times = {}
    for kind in ("peer", "door", "native"):
        python = options.peer if kind == "peer" else sys.executable
        shown = subprocess.run([python, __file__, "--kind", kind], check=True, capture_output=True, text=True).stdout
        times[kind] = json.loads(shown.splitlines()[-1])
    for kind, microseconds in times.items():
        print(f"{kind:8} {microseconds:7.2f} us   {microseconds / times['peer']:.2f} of accelerate's")


if __name__ == "__main__":
    main()
