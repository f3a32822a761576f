"""The simulated device under the names of devices that no test ever ran on: what a row of the table says is enough for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import torch
from torch import nn

from paceline import Accelerator, notebook_launcher


def training_loop(model, mixed_precision, seed, batch_size):
    torch.manual_seed(seed)
    accelerator = Accelerator(mixed_precision=mixed_precision)
    data = torch.linspace(-1, 1, 16 * 8).view(16, 8)
    loader = torch.utils.data.DataLoader(data, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for x in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    world = f"{accelerator.device.type} {accelerator.num_processes} {torch.distributed.get_backend()}"
    return world, next(iter(accelerator.get_state_dict(model).values())).cpu().double().sum().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    print(*notebook_launcher(training_loop, (model, "no", 42, 2), num_processes=PROCS))
"""


def outcome(folder: Path, procs: int, **variables: str) -> list[str]:
    (folder / "notebook.py").write_text(SCRIPT.replace("PROCS", str(procs)))
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        env={**os.environ, **variables},
        capture_output=True, text=True, timeout=300, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif("SIMULATED_DEVICES" not in os.environ, reason="only a simulated device has another name")
@pytest.mark.parametrize("name", ["npu", "tpu"])
def test_a_notebook_trains_on_it(tmp_path: Path, name: str, device: torch.device) -> None:
    lines = outcome(tmp_path, 2, SIMULATED_NAME=name)
    assert lines[0] == f"Launching training on 2 {name.upper()}s."
    kind, width, _, weights = lines[-1].replace("(", "").replace("'", "").split()
    assert (kind, width) == (name, "2")
    on_cpu = outcome(tmp_path, 2, SIMULATED_DEVICES="0")
    assert on_cpu[0] == "Launching training on 2 CPU processes."
    assert float(weights) == pytest.approx(float(on_cpu[-1].split()[-1]), rel=1e-6)
