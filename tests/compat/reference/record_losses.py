"""Runs losses_program.py under the real accelerate on 1 and 2 processes and writes recorded_losses.json.

/tmp/real/bin/python tests/compat/reference/record_losses.py    (its environment: see record.py; transformers besides)
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def worker(out, folder):
    """One process."""
    import losses_program

    rank = os.environ.get("RANK", "0")
    Path(f"{out}.{rank}").write_text(json.dumps(losses_program.everything(folder)), encoding="utf-8")


def main():
    """Processes with torchrun's variables."""
    recorded = {}
    for size in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        group = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        common = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out")
            running = []
            for rank in range(size):
                own = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
                words = [sys.executable, __file__, out, folder]
                running.append(subprocess.Popen(words, env={**common, **own}, cwd=HERE))
            if any([process.wait(600) for process in running]):
                sys.exit("a process failed")
            recorded[size] = [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(size)]
    (HERE / "recorded_losses.json").write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    worker(*sys.argv[1:]) if len(sys.argv) == 3 else main()
