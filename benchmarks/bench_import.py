"""What `from paceline import Accelerator` and constructing one cost over `import torch`, in CPU seconds of fresh processes.

Each process imports torch first and reads its own CPU clock before and after the rest: the import of torch, which takes
2 s and varies by more than what is measured here, so stays outside.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys

CODE = """
import time, torch
before = time.process_time()
from {module} import Accelerator
Accelerator(cpu=True)
print(time.process_time() - before)
"""


def cpu_seconds(module: str) -> float:
    """CPU seconds over `import torch` in one fresh interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # users keep compiled modules
    command = [sys.executable, "-c", CODE.format(module=module)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    names = [name for name in ("paceline", "accelerate") if importlib.util.find_spec(name)]
    for name in names:
        cpu_seconds(name)
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            found[name].append(cpu_seconds(name))
    print("| what | CPU s over `import torch` (quartiles) | must reach |\n| --- | --- | --- |")
    for name, values in found.items():
        low, middle, high = statistics.quantiles(values, n=4)
        must = "<= +0.10" if name == "paceline" else "-"
        print(f"| import {name}, construct | {middle:+.3f} ({low:.3f} .. {high:.3f}) | {must} |")


if __name__ == "__main__":
    main()
