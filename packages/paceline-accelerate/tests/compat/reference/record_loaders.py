"""Runs loaders_program.py under the real accelerate on 1, 2 and 3 processes and writes recorded_loaders.json.xz.

/tmp/real/bin/python record_loaders.py       (its environment: see record.py; torchdata besides)
"""

import json
import lzma
import os
import sys
import tempfile
from pathlib import Path

from real_ranks import run_on_ranks

HERE = Path(__file__).parent


def worker(out):
    """One process."""
    import loaders_program

    Path(f"{out}.{os.environ.get('RANK', '0')}").write_text(json.dumps(loaders_program.everything()), encoding="utf-8")


def main():
    """Processes with torchrun's variables."""
    recorded = {}
    for size in (1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out")
            run_on_ranks(size, __file__, out)
            ranks = [json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8")) for rank in range(size)]
        recorded[size] = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    text = json.dumps(recorded, separators=(",", ":"))
    (HERE / "recorded_loaders.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    worker(sys.argv[1]) if len(sys.argv) == 2 else main()
