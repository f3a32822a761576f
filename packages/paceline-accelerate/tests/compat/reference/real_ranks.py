"""Runs a recorder of this folder on several processes, with torchrun's variables."""

import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_on_ranks(size, *words, timeout_s=900):
    """Runs `python words` as each rank, and ends this program where one of them fails; one process is given no variables."""
    common = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    if size > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        common |= {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
    running = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
        running.append(subprocess.Popen([sys.executable, *words], env={**common, **own}, cwd=HERE))
    if any([process.wait(timeout_s) for process in running]):
        sys.exit(f"{' '.join(words)}: a process failed")
