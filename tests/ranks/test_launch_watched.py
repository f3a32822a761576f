"""Runs under `paceline launch --watch`: one folder holds what all launchers and all ranks have written."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
from warm_python import executable

from paceline.watch.journal import JournalReader
from paceline.watch.records import CheckpointSaved, End, ErrorShown, Hello, Record, Round, Tick, Values

TRAIN = """
    import os, torch
    from paceline import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"step": step})
        if step == 2 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("no such batch")
    accelerator.save_state("saved")
"""


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(dedent(TRAIN))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM"))}
    env |= {"OMP_NUM_THREADS": "1", "PACELINE_RUN_SECRET": "of these tests alone"}
    command = [executable(), "-m", "paceline.cli.main", "launch", "--max-restarts", "1", *map(str, words), "train.py"]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(reader: JournalReader, kind: type[Record]) -> list[tuple[int, Record]]:
    return [(line.number, line.record) for line in reader.read() if isinstance(line.record, kind)]


def all_of(folder: Path, kind: type[Record]) -> list[tuple[int, Record]]:
    return lines_of(JournalReader(folder), kind)


def test_a_run_that_fails_and_starts_again(tmp_path: Path) -> None:
    launcher = start(tmp_path, "-n", 2, "--watch")
    _, error = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, error
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"recorded in runs/{folder.name}" in error
    rounds = [record for _, record in all_of(folder, Round)]
    assert [(entry.number, entry.restarts) for entry in rounds if isinstance(entry, Round)] == [(0, 0), (1, 1)]
    (shown,) = all_of(folder, ErrorShown)
    assert isinstance(shown[1], ErrorShown)
    assert shown[1].rank == 1
    assert "ValueError: no such batch" in shown[1].text
    assert all_of(folder, End) == [(0, End(0, ""))]
    starts = [(rank, hello.restart) for rank, hello in all_of(folder, Hello) if isinstance(hello, Hello)]
    assert sorted(starts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    last = {rank: tick.step for rank, tick in all_of(folder, Tick) if isinstance(tick, Tick)}
    assert last == {0: 4, 1: 4}
    logged = [rank for rank, values in all_of(folder, Values) if isinstance(values, Values) and "step" in values.values]
    assert set(logged) == {0}
    assert len(all_of(folder, CheckpointSaved)) == 1


@pytest.mark.long
def test_two_hosts_that_share_a_folder(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("--nodes", 2, "--main-address", "127.0.0.1", "--main-port", port, "--watch", "--node-rank")
    launchers = [start(tmp_path, *words, node) for node in range(2)]
    for launcher in launchers:
        _, error = launcher.communicate(timeout=60)
        assert launcher.returncode == 0, error
    (folder,) = (tmp_path / "runs").iterdir()
    reader = JournalReader(folder)
    assert (reader.header.procs, reader.header.nodes, reader.header.pid) == (2, 2, launchers[0].pid)
    names = sorted(path.name for path in (folder / "watch").iterdir())
    assert names == ["launcher-0.jsonl", "launcher-1.jsonl", "rank-00000.jsonl", "rank-00001.jsonl", "run.json"]
    nodes = {rank: hello.node for rank, hello in all_of(folder, Hello) if isinstance(hello, Hello)}
    assert nodes == {0: 0, 1: 1}
