"""Runs `state_program` under the real accelerate and writes its answers: `python record_state.py`, in its own environment.

As `record.py`; writes recorded_state.json (by number of processes, then by rank).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from real_ranks import run_on_ranks

HERE = Path(__file__).parent


def worker(folder):
    """One process."""
    import state_program

    answers = json.dumps(state_program.everything())
    Path(folder, os.environ.get("RANK", "0")).write_text(answers, encoding="utf-8")


def ranks(size):
    """The answers of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(size, __file__, folder)
        return [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(size)]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        worker(sys.argv[1])
    else:
        recorded = {size: ranks(size) for size in (1, 2, 3)}
        lines = json.dumps(recorded, indent=1)
        (HERE / "recorded_state.json").write_text(lines + "\n", encoding="utf-8")
