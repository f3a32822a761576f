"""Runs `surface_program` under the real accelerate 1.15.0: `python record_surface.py`, in its own environment."""

import json
import os
from pathlib import Path

os.environ |= {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}

if __name__ == "__main__":
    import surface_program

    answers = json.dumps(surface_program.everything(), indent=1, sort_keys=True)
    Path(__file__).with_name("recorded_surface.json").write_text(answers + "\n", encoding="utf-8")
