"""Records what the real accelerate, transformers and DeepSpeed do, for tests that run the same under our names.

python tests/together/reference/record_deepspeed.py    in an environment that has them (and `DS_ACCELERATOR=cpu` without GPUs)

The Trainer runs take DeepSpeed's gloo backend: its shared-memory kernel would be compiled, and changes no number.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "programs")]
PROGRAM = HERE.parent / "programs" / "deepspeed_trainer.py"
WITHOUT_KERNEL = (
    "import runpy, sys, deepspeed.comm.torch as torch_backend\n"
    "torch_backend.build_shm_op = lambda: None\n"
    "sys.argv = sys.argv[1:]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)


def train(options: dict) -> list[dict]:
    """What a Trainer run of one process ends with: on the CPU the real one fails with two, in the loop that evaluates."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Path(folder) / "runner.py"
        runner.write_text(WITHOUT_KERNEL, encoding="utf-8")
        words = ["--nproc-per-node", "1", "--master-port", "29713", str(runner), str(PROGRAM), folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words, json.dumps(options)], env=env, check=True
        )
        return json.loads((Path(folder) / "rank_0.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    import deepspeed_plugin_program
    from deepspeed_cases import CASES, RECORDED

    recorded = {
        "versions": {name: version(name) for name in ("accelerate", "deepspeed", "torch", "transformers")},
        "plugin": deepspeed_plugin_program.run_all(),
        "trainer": {name: train(CASES[name]) for name in RECORDED},
    }
    path = HERE / "recorded_deepspeed.json"
    path.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
