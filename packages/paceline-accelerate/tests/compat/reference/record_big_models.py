"""Runs big_models_program.py under the real accelerate: `python record_big_models.py`; see record.py.

Writes recorded_big_models.json, and an offload folder that the real library wrote (big_models_offload/).
"""

import json
import shutil
from pathlib import Path

import accelerate
import big_models_program

HERE = Path(__file__).parent


def main():
    """One process."""
    results = {"version": accelerate.__version__, **big_models_program.main()}
    # A line for each case.
    lines = [f"{json.dumps(name)}: {json.dumps(result, separators=(',', ':'))}" for name, result in results.items()]
    (HERE / "recorded_big_models.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    offload = HERE / "big_models_offload"
    shutil.rmtree(offload, ignore_errors=True)
    accelerate.disk_offload(big_models_program.net(), offload)


if __name__ == "__main__":
    main()
