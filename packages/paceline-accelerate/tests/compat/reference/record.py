"""Runs the programs under the real accelerate and writes what they gave: `python record.py`, in its own environment.

    python3 -m venv /tmp/real && /tmp/real/bin/pip install torch==2.13.0 accelerate==1.15.0 numpy
    /tmp/real/bin/python record.py

Writes recorded.json (by number of processes) and checkpoint/ (a folder that the real `save_state` made).
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from real_ranks import run_on_ranks

HERE = Path(__file__).parent


def worker(folder, out):
    """One process."""
    import accelerate
    import programs

    size = int(os.environ.get("WORLD_SIZE", "1"))
    found = programs.everything(folder)
    if size == 1:
        made = os.path.join(folder, "made")
        objects = programs.run_objects(made, automatic=False)
        programs.step(*objects)
        objects[0].save_state(os.path.join(made, "checkpoint"))
        shutil.rmtree(HERE / "checkpoint", ignore_errors=True)
        shutil.copytree(os.path.join(made, "checkpoint"), HERE / "checkpoint")
        found["resume"] = programs.resume(made)
    found["version"] = accelerate.__version__
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")


def main():
    """One and two processes, with torchrun's variables."""
    recorded = {}
    for size in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out.json")
            run_folder = os.path.join(folder, "run")
            os.mkdir(run_folder)
            run_on_ranks(size, __file__, run_folder, out)
            recorded[size] = json.loads(Path(out).read_text(encoding="utf-8"))
    (HERE / "recorded.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    worker(*sys.argv[1:]) if len(sys.argv) == 3 else main()
