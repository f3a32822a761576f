"""A launcher that needs no hostfile: one new file, used through `paceline launch --launcher`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from paceline.base import registry
from paceline.cli import main as cli

TOY = """
import socket
import subprocess

from paceline_hosts.launchers.batch import PYTHON, environment_with
from paceline.launch.launcher import Outcome, Rendered


class Toy:
    name = "toy"
    hosts = "chosen"

    def available(self):
        return ""

    def render(self, job):
        return Rendered(job, job.target.command, steps=((*PYTHON, "run"),) * job.nodes)

    def submit(self, rendered):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = free.getsockname()
        started = []
        for node, step in enumerate(rendered.steps):
            started.append(subprocess.Popen(step, env=environment_with(rendered.job, place, node), stdin=subprocess.DEVNULL))
        return Handle(started)


class Handle:
    def __init__(self, started):
        self.started = started

    def wait(self):
        return Outcome(max(each.wait() for each in self.started))


LAUNCHER = Toy()
"""
TRAIN = """
    import torch, torch.distributed as dist
    from paceline import Accelerator
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
    print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {total.item():g}")
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with one file, and an entry point that names its launcher."""
    metadata = tmp_path / "packages" / "toy-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "entry_points.txt").write_text("[paceline.launchers]\ntoy = toy:LAUNCHER\n")
    (tmp_path / "packages" / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    registry._all_points.cache_clear()
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    monkeypatch.chdir(tmp_path)
    yield
    registry._all_points.cache_clear()
    sys.modules.pop("toy", None)


def test_it_starts_the_processes_of_all_its_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith(("PACELINE", "SLURM", "OMPI"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["launch", "--launcher", "toy", "--nodes", "2", "--procs", "1", "train.py"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["node0: [rank0]: rank 0 of 2: 3", "node1: [rank1]: rank 1 of 2: 3"]


def test_a_dry_run_shows_what_it_would_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--launcher", "toy", "--nodes", "2", "--procs", "2", "--dry-run", "train.py"]) == 0
    text = capsys.readouterr().out
    assert text.count(f"{sys.executable} -u -m paceline_hosts.remote run") == 2
    assert "   3           1     1  node1" in text


def test_what_only_a_hostfile_gives_a_meaning_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf").write_text("node0 slots=2\n")
    words = ["launch", "--launcher", "toy", "--hostfile", "hf", "--node-rank", "1", "--include", "node0", "train.py"]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    for problem in (
        "the launcher toy takes no hostfile",
        "hostfile=hf",
        "include=node0",
        "node_rank is of one node, and the launcher starts all",
        "how many processes each host runs",
    ):
        assert problem in told
