"""A DeepSpeed script with states, and parameters, on disk: under the real DeepSpeed and under ours, in turns.

    python benchmarks/bench_disk.py --peer PYTHON --folder /local/nvme    Markdown; PYTHON has DeepSpeed, with async_io built

Two ranks, one thread each, a stack of linear layers, AdamW, 8 rows a rank. Per rank: seconds of a step by the clock and of CPU
(medians), the most anonymous memory, which the system cannot take back, and that of mapped files, which it can; bytes on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = Path(__file__).parent / "parallel" / "disk_program.py"
SERVED = (
    "import runpy, sys; from paceline.compat import install; install(['deepspeed']); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
RANKS = 2
SKIPPED = 2  # the steps that make files, states and buffers


def run(python: list[str], arguments: list[str], folder: str) -> list[dict]:
    """Runs the program on all ranks, and returns what each of them has printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS)}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    path = f"{Path(python[0]).parent}{os.pathsep}{os.environ['PATH']}"
    ranks = []
    for rank in range(RANKS):
        own = {**os.environ, **group, "PATH": path, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [*python, str(PROGRAM), *arguments, "--folder", folder]
        ranks.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    rows = []
    for process in ranks:
        out, errors = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise SystemExit(f"a rank of {python[0]} ended with {process.returncode}:\n{errors[-4000:]}")
        rows.append(json.loads(lines[0].removeprefix("RESULT ")))
    return rows


def row(name: str, ranks: list[dict]) -> str:
    """Returns a row of the table: of the ranks, the slower one and the one with more memory."""
    seconds = max(statistics.median(rank["seconds"][SKIPPED:]) for rank in ranks)
    cpu = max(statistics.median(rank["cpu"][SKIPPED:]) for rank in ranks)
    most = [str(max(rank[field] for rank in ranks)) for field in ("anonymous", "of_files", "on_disk")]
    loss = statistics.mean(rank["losses"][-1] for rank in ranks)
    return f"| {name} | {seconds:.2f} | {cpu:.2f} | {' | '.join(most)} | {loss:.8f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the Python that has DeepSpeed")
    parser.add_argument("--folder", default=None, help="on the disk that is measured")
    parser.add_argument("--what", nargs="+", default=["memory", "optimizer", "all"])
    parser.add_argument("--only", choices=("both", "ours", "peer"), default="both")
    options, arguments = parser.parse_known_args()
    print(f"{time.strftime('%Y-%m-%d')}, {' '.join(arguments)}\n")
    print(
        "| | s a step | CPU s | MiB that stay | MiB of files | MiB on disk | last loss |\n|---|---|---|---|---|---|---|"
    )
    for what in options.what:
        for name, python in (("Paceline", [sys.executable, "-c", SERVED]), ("DeepSpeed", [options.peer])):
            if options.only == ("peer" if name == "Paceline" else "ours"):
                continue
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                print(row(f"{what}, {name}", run(python, ["--what", what, *arguments], folder)), flush=True)


if __name__ == "__main__":
    main()
