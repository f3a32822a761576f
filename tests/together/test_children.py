"""Processes that a served one starts are served too: spawned workers of a loader, and commands."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest
from warm_python import executable

import paceline_accelerate as accelerate
import paceline_deepspeed as deepspeed
from paceline_doors.names import folder_for_children

PROGRAM = """
import subprocess
import sys
from importlib.metadata import version

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index)


if __name__ == "__main__":
    numbers = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    loader = Accelerator(cpu=True).prepare(numbers)
    print(sum(int(batch.sum()) for batch in loader), version("accelerate"), flush=True)
    child = "from accelerate.utils import set_seed; import importlib.metadata as m; print(m.version('accelerate'))"
    subprocess.run([sys.executable, "-c", child], check=True)
"""


@pytest.mark.parametrize("library", [accelerate, deepspeed])
def test_the_folder_for_children_says_the_version_that_is_served(library) -> None:
    name = library.__name__.removeprefix("paceline_")
    [found] = importlib.metadata.distributions(path=[str(folder_for_children(name))])
    assert (found.metadata["Name"], found.version) == (name, library.VERSION)


@pytest.mark.slow
def test_spawned_workers_and_commands(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    ended = subprocess.run(
        [executable(), "-m", "paceline.compat", str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["28 1.15.0", "1.15.0"]
