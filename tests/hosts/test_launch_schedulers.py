"""Under a real `mpirun` and a real SLURM of one machine; skipped where they are not installed.

Debian: `apt-get install --no-install-recommends openmpi-bin slurm-wlm munge` (and root, for SLURM).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from hosts.local_slurm import clean, local_slurm
from warm_python import executable

TOTAL = """
    import os, torch, torch.distributed as dist
    from paceline.world.rendezvous import join, leave
    from paceline.world.world import World
    world = join(World.detect(), cpu=True)
    total = torch.ones(1)
    if world.size > 1:
        dist.all_reduce(total)
    line = f"{world.source} {world.rank} {world.size} {world.local_rank} {int(total)}\\n"
    os.write(1, line.encode())  # in one piece: lines of ranks share a pipe
    leave()
"""
NEEDS_MPIRUN = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
Slurm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(dedent(TOTAL))
    return path


@NEEDS_MPIRUN
def test_mpirun(script: Path) -> None:
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", executable(), str(script)]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=90)
    assert sorted(done.stdout.splitlines()) == ["mpi 0 2 0 2", "mpi 1 2 1 2"], done.stderr


@NEEDS_MPIRUN
def test_a_launcher_that_mpirun_starts(script: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("localhost slots=2\n")
    command = [executable(), "-m", "paceline.cli.main", "launch", "--hostfile", "hf", "--launcher", "openmpi"]
    own = ["--launcher-args", "--allow-run-as-root --oversubscribe", str(script)]
    done = subprocess.run([*command, *own], env=clean(), cwd=tmp_path, capture_output=True, text=True, timeout=90)
    lines = [f"localhost: [rank{rank}]: torchrun {rank} 2 {rank} 2" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == lines, done.stderr


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A SLURM of one node; gives a function that runs one of its commands."""
    folder = tmp_path_factory.mktemp("slurm")
    with local_slurm(folder, nodes=1, cpus=4) as env:

        def run(*words: object) -> subprocess.CompletedProcess[str]:
            command = [str(word) for word in words]
            return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=90)

        yield run


def test_srun(slurm: Slurm, script: Path) -> None:
    done = slurm("srun", "-n", 2, executable(), script)
    assert sorted(done.stdout.splitlines()) == ["slurm 0 2 0 2", "slurm 1 2 1 2"], done.stderr


def test_a_batch_script_and_a_step_in_it(slurm: Slurm, script: Path, tmp_path: Path) -> None:
    batch = tmp_path / "job.sh"
    batch.write_text(f"#!/bin/sh\n{executable()} {script}\nsrun {executable()} {script}\n")
    done = slurm("sbatch", "--wait", "-n", 2, "-o", tmp_path / "out", batch)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0] == "single 0 1 0 1"  # the batch script is one process, though the job has two tasks
    assert sorted(lines[1:]) == ["slurm 0 2 0 2", "slurm 1 2 1 2"]


def test_an_interactive_shell_stands_alone(slurm: Slurm, script: Path) -> None:
    done = slurm("salloc", "-n", 2, executable(), script)
    assert done.stdout.splitlines() == ["single 0 1 0 1"], done.stderr


def test_a_launcher_as_the_one_task(slurm: Slurm, script: Path) -> None:
    launch = (executable(), "-m", "paceline.cli.main", "launch", "-n", 2)
    done = slurm("srun", "-n", 1, *launch, script)
    assert sorted(done.stdout.splitlines()) == ["torchrun 0 2 0 2", "torchrun 1 2 1 2"], done.stderr
    done = slurm("srun", "-n", 2, *launch, script)
    assert "[launch-tasks]" in done.stderr


def test_a_launcher_that_srun_starts(slurm: Slurm, script: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("n1 slots=2\n")
    words = (executable(), "-m", "paceline.cli.main", "deepspeed", "--hostfile", tmp_path / "hf", "--force_multi")
    done = slurm(*words, "--launcher", "slurm", script)
    assert sorted(done.stdout.splitlines()) == [f"n1: [rank{r}]: torchrun {r} 2 {r} 2" for r in range(2)], done.stderr
    (tmp_path / "hf").write_text("n1 slots=2\nn9 slots=2\n")
    done = slurm(*words, "--launcher", "slurm", script)
    assert done.returncode == 1
    assert "2 of 2 hosts cannot take part" in done.stderr, done.stderr
