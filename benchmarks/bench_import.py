"""What `from paceline import Accelerator` and constructing one cost over `import torch`, in CPU seconds of fresh processes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import subprocess
import sys

CANDIDATES = {
    "torch": "import torch",
    "paceline": "import torch; from paceline import Accelerator; Accelerator(cpu=True)",
    "accelerate": "import torch; from accelerate import Accelerator; Accelerator(cpu=True)",
}


def cpu_seconds(code: str) -> float:
    """User and system seconds of one fresh interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # users keep compiled modules
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    names = [name for name in CANDIDATES if importlib.util.find_spec(name)]
    for name in names:
        cpu_seconds(CANDIDATES[name])
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for name in names:
            found[name].append(cpu_seconds(CANDIDATES[name]))
    print("| what | CPU s | over `import torch` | must reach |\n| --- | --- | --- | --- |")
    for name in names:
        extra = statistics.median(a - b for a, b in zip(found[name], found["torch"], strict=True))
        must = "<= +0.10" if name == "paceline" else "-"
        print(f"| import {name}, construct | {statistics.median(found[name]):.2f} | {extra:+.3f} s | {must} |")


if __name__ == "__main__":
    main()
