"""Runs the benchmarks and writes one dated report: command, versions, machine, and every row with its peer.

python benchmarks/run.py [NAME ...] [--turns 15] [--quick] [--report FILE]

NAME: step, launch, import, collectives, checkpoint, loader, parallel, pipeline, forecast, deepspeed, hosts, memory; all of
them where none is named. `--quick` takes fewer turns and a smaller model, to see that everything runs: its numbers are none
to compare.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
WITH_TURNS = {
    "step": ["--peers"],
    "checkpoint": ["--peers"],
    "launch": [],
    "import": [],
    "parallel": [],
    "pipeline": [],
    "deepspeed": [],
    "forecast": [],
}
QUICK = {
    "hosts": ["--faults", "worker", "--names", "paceline launch"],
    "checkpoint": ["--layers", "2"],
    "parallel": ["--size", "4M"],
    "forecast": ["--size", "4M"],
    "deepspeed": ["--size", "4M", "--starts", "2"],
    "memory": ["--size", "4M", "--world", "2"],
}


def machine() -> str:
    """Processor, cores and load, in a line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def versions() -> str:
    """Versions of what is measured."""
    found = []
    for name in ("paceline", "torch", "accelerate", "lightning-fabric", "deepspeed"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--report", type=Path, default=HERE / "reports" / f"{time.strftime('%Y-%m-%d')}.md")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    turns = 3 if options.quick else options.turns
    names = options.names or [path.stem.removeprefix("bench_") for path in sorted(HERE.glob("bench_*.py"))]
    names += [] if options.names else ["memory"]
    text = [
        f"# Benchmarks of {time.strftime('%Y-%m-%d')}\n",
        f"{versions()}. {machine()}. Command: `python benchmarks/run.py {' '.join(sys.argv[1:])}`.\n",
    ]
    failed = 0
    for name in names:
        command = [sys.executable, str(HERE / ("memory.py" if name == "memory" else f"bench_{name}.py"))]
        if name in WITH_TURNS:
            command += ["--turns", str(turns), *WITH_TURNS[name]]
        command += QUICK.get(name, []) if options.quick else []
        print(f"{name} ...", file=sys.stderr, flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        failed += done.returncode != 0
        print(done.stdout)
        text.append(f"## {name}\n\n{done.stdout.strip()}\n")
    options.report.parent.mkdir(exist_ok=True)
    options.report.write_text("\n".join(text))
    print(f"written to {options.report}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
