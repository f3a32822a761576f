"""Runs losses_program.py under the real accelerate on 1 and 2 processes and writes recorded_losses.json.

/tmp/real/bin/python record_losses.py    (its environment: see record.py; transformers besides)
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from real_ranks import run_on_ranks

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
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out")
            run_on_ranks(size, __file__, out, folder)
            recorded[size] = [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(size)]
    (HERE / "recorded_losses.json").write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    worker(*sys.argv[1:]) if len(sys.argv) == 3 else main()
