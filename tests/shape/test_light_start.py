"""A run starts without what only some runs need: torch's distributed checkpoint and tensors take half a second to load.

And without most of Paceline: who trains one layer in one process should not have to trust, or to read, what serves other runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HEAVY = (
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch._dynamo",
    "sympy",
    "hjson",
    "fsspec",
    "s3fs",
)


def loaded(program: str) -> list[str]:
    """Which of the heavy modules a program has loaded."""
    program += f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_an_accelerator_loads_none_of_them() -> None:
    assert loaded("import paceline; paceline.Accelerator(cpu=True)") == []


def test_the_names_of_deepspeed_load_none_of_them() -> None:
    program = "from paceline.compat import install; install(['deepspeed'])\nimport deepspeed; deepspeed.initialize; "
    assert loaded(program + "deepspeed.init_distributed; deepspeed.DeepSpeedEngine") == []


# A loop of one process, as in the first lines of the README.
TRAINS = """
import torch
from paceline import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(samples, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
accelerator.end_training()

import sys
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] == "paceline" and getattr(module, "__file__", None):
        print(name, module.__file__)
"""
# Neither number grows without a reason, see `TRAINS`.
MOST_MODULES, MOST_LINES = 120, 18_000


def test_one_process_loads_a_part_of_paceline(tmp_path: Path) -> None:
    # Neither a launcher's variables nor a config file: the process is alone, as `python train.py` is.
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    program = tmp_path / "train.py"
    program.write_text(TRAINS, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True, env={**env, "HOME": str(tmp_path)}
    )
    files = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    lines = sum(Path(file).read_text(encoding="utf-8").count("\n") for file in files.values())
    assert "paceline.accelerator" in files
    assert len(files) <= MOST_MODULES, f"{len(files)} modules: {sorted(files)}"
    assert lines <= MOST_LINES, f"{lines} lines in {len(files)} modules"
