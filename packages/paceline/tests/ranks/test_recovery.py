"""A rank is killed: its successors find all imports in the launcher, and go on with the same numbers, also at another width."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
IMPORTED = {"torch._dynamo", "torch.distributed.checkpoint", "paceline.accelerator"} & set(sys.modules)

import json, os, signal
import torch
from torch.utils.data import DataLoader
from paceline import Accelerator

accelerator = Accelerator(cpu=True, split_batches=True, project_dir="run")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
rows = torch.randn(12 * 16, 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=12, shuffle=True))
step = accelerator.resume().step
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    if step == 9 and accelerator.process_index == 1 and "KILL" in os.environ and not os.path.exists("killed"):
        open("killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    loss = float(accelerator.reduce(loss.detach(), "mean"))
    if accelerator.is_main_process:
        with open("lines", "a") as lines:
            print(json.dumps([step, loss, sorted(IMPORTED)]), file=lines)
    if step % 4 == 0:
        accelerator.save_state()
"""


def run(folder: Path, procs: int, *words: str, script: str = SCRIPT, **env: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    # A cold start: what this Python has imported already would hide what the launcher imports.
    command = [sys.executable, "-m", "paceline", "launch", "--cpu", "--procs", str(procs), *words, "train.py"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE")}
    return subprocess.run(
        command, cwd=folder, env={**kept, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=240
    )


def lines(folder: Path) -> list[tuple[int, float, list[str]]]:
    return [tuple(json.loads(line)) for line in (folder / "lines").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(folder, 2)
    assert done.returncode == 0, done.stderr
    return {step: loss for step, loss, _ in lines(folder)}


def test_all_imports_of_a_recovery_are_in_the_launcher(undisturbed: dict[int, float], tmp_path: Path) -> None:
    done = run(tmp_path, 2, "--max-restarts", "1", KILL="1")
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path)
    assert [step for step, _, _ in found] == [*range(1, 10), *range(9, 17)]
    assert all(undisturbed[step] == loss for step, loss, _ in found)
    assert {tuple(imported) for _, _, imported in found} == {
        ("paceline.accelerator", "torch._dynamo", "torch.distributed.checkpoint")
    }


def test_other_numbers_of_processes_go_on_with_the_same_numbers(undisturbed: dict[int, float], tmp_path: Path) -> None:
    done = run(tmp_path, 2, KILL="1")
    assert done.returncode == 128 + 9, done.stderr
    done = run(tmp_path, 3)
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path)
    assert [step for step, _, _ in found] == [*range(1, 10), *range(9, 17)]
    assert [loss for _, loss, _ in found] == pytest.approx([undisturbed[step] for step, _, _ in found], rel=1e-5)


def test_a_variable_of_the_compiler_that_comes_too_late_is_named(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text("import os; os.environ['TORCHDYNAMO_VERBOSE'] = '1'")
    text = "import settings, torch\ntorch.optim.SGD([torch.zeros(1)])\nprint(torch._dynamo.config.verbose)\n"
    done = run(tmp_path, 2, script=text)
    assert (done.stdout.split(), done.returncode) == (["False", "False"], 0)
    assert "paceline: TORCHDYNAMO_VERBOSE: set by a file that the script imports" in done.stderr
    own = "import os; os.environ['TORCHDYNAMO_VERBOSE'] = '1'\n"
    done = run(tmp_path, 2, script=own + text)
    assert (done.stdout.split(), done.returncode) == (["True", "True"], 0)
    assert "TORCHDYNAMO_VERBOSE" not in done.stderr
