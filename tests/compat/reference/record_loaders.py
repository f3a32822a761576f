"""Runs loaders_program.py under the real accelerate on 1, 2 and 3 processes and writes recorded_loaders.json.xz.

/tmp/real/bin/python tests/compat/reference/record_loaders.py       (its environment: see record.py; torchdata besides)
"""

import json
import lzma
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def worker(out):
    """One process."""
    import loaders_program

    Path(f"{out}.{os.environ.get('RANK', '0')}").write_text(json.dumps(loaders_program.everything()), encoding="utf-8")


def main():
    """Processes with torchrun's variables."""
    recorded = {}
    for size in (1, 2, 3):
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
                running.append(subprocess.Popen([sys.executable, __file__, out], env={**common, **own}, cwd=HERE))
            if any([process.wait(900) for process in running]):
                sys.exit("a process failed")
            ranks = [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(size)]
        recorded[size] = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    text = json.dumps(recorded, separators=(",", ":"))
    (HERE / "recorded_loaders.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    worker(sys.argv[1]) if len(sys.argv) == 2 else main()
