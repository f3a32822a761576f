"""Runs `state_program` under the real accelerate and writes its answers: `python record_state.py`, in its own environment.

As `record.py`; writes recorded_state.json (by number of processes, then by rank).
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


def worker(folder):
    """One process."""
    import state_program

    answers = json.dumps(state_program.everything())
    Path(folder, os.environ.get("RANK", "0")).write_text(answers, encoding="utf-8")


def ranks(size):
    """The answers of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        common = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
        if size > 1:
            common |= {
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
        running = []
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            running.append(subprocess.Popen([sys.executable, __file__, folder], env={**common, **own}, cwd=HERE))
        if any([each.wait(300) for each in running]):
            sys.exit("a process failed")
        return [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(size)]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        worker(sys.argv[1])
    else:
        recorded = {size: ranks(size) for size in (1, 2, 3)}
        lines = json.dumps(recorded, indent=1)
        (HERE / "recorded_state.json").write_text(lines + "\n", encoding="utf-8")
