"""Runs under `paceline launch --watch`: one folder holds what all launchers and all ranks have written."""

from __future__ import annotations

import io
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from free_ports import free_port
from warm_python import executable

from paceline import Accelerator
from paceline.testing import run_ranks
from paceline_lens.watch.journal import JournalReader
from paceline_lens.watch.records import (
    CheckpointSaved,
    ErrorShown,
    Hello,
    JournalRecord,
    LauncherEnded,
    RoundStarted,
    Tick,
    ValuesLogged,
)

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


def start(folder: Path, *words: object, script: str = TRAIN) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(dedent(script))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM"))}
    env |= {"OMP_NUM_THREADS": "1", "PACELINE_RUN_SECRET": "of these tests alone"}
    command = [executable(), "-m", "paceline.cli.main", "launch", "--max-restarts", "1", *map(str, words), "train.py"]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def all_of(folder: Path, kind: type[JournalRecord]) -> list[tuple[int, JournalRecord]]:
    """Number of the rank or the launcher, and the record."""
    lines = JournalReader(folder).read()
    return [(line.number, line.record) for line in lines if isinstance(line.record, kind)]


def test_a_run_that_fails_and_starts_again(tmp_path: Path) -> None:
    launcher = start(tmp_path, "-n", 2, "--watch")
    _, error = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, error
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"recorded in runs/{folder.name}" in error
    rounds = [record for _, record in all_of(folder, RoundStarted)]
    assert [(entry.number, entry.restarts) for entry in rounds if isinstance(entry, RoundStarted)] == [(0, 0), (1, 1)]
    (shown,) = all_of(folder, ErrorShown)
    assert isinstance(shown[1], ErrorShown)
    assert shown[1].rank == 1
    assert "ValueError: no such batch" in shown[1].text
    assert all_of(folder, LauncherEnded) == [(0, LauncherEnded(0, ""))]
    starts = [(rank, hello.restart) for rank, hello in all_of(folder, Hello) if isinstance(hello, Hello)]
    assert sorted(starts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    last = {rank: tick.step for rank, tick in all_of(folder, Tick) if isinstance(tick, Tick)}
    assert last == {0: 4, 1: 4}
    logged = [
        rank
        for rank, values in all_of(folder, ValuesLogged)
        if isinstance(values, ValuesLogged) and "step" in values.values
    ]
    assert set(logged) == {0}
    assert len(all_of(folder, CheckpointSaved)) == 1


@pytest.mark.parametrize("is_shared", [True, False])
def test_without_a_launcher_a_host_says_that_its_folder_is_not_shared(is_shared: bool, tmp_path: Path) -> None:
    def train() -> str:
        rank = os.environ["RANK"]
        folder = tmp_path if is_shared else tmp_path / rank
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank, PACELINE_WATCH_DIR=str(folder))
        messages = io.StringIO()
        logging.getLogger("paceline.watch").addHandler(logging.StreamHandler(messages))
        model = torch.nn.Linear(4, 2)
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return messages.getvalue()

    first, second = run_ranks(train, 2)
    assert first == ""
    assert ("lacks the ranks of this host" in second) != is_shared
    assert list(tmp_path.glob("1/rank-00000.jsonl")) == []


def run_two_hosts(folders: list[Path]) -> list[str]:
    """Runs the script on two launchers, each in its folder; returns what they have said."""
    port = free_port()
    words = ("--nodes", 2, "--main-address", "127.0.0.1", "--main-port", port, "--watch", "--node-rank")
    launchers = [start(folder, *words, node) for node, folder in enumerate(folders)]
    errors = []
    for launcher in launchers:
        _, error = launcher.communicate(timeout=60)
        assert launcher.returncode == 0, error
        errors.append(error)
    return errors


@pytest.mark.long
def test_two_hosts_that_share_a_folder(tmp_path: Path) -> None:
    run_two_hosts([tmp_path, tmp_path])
    (folder,) = (tmp_path / "runs").iterdir()
    reader = JournalReader(folder)
    assert (reader.header.procs, reader.header.nodes) == (2, 2)
    names = sorted(path.name for path in (folder / "watch").iterdir())
    assert names == ["launcher-0.jsonl", "launcher-1.jsonl", "rank-00000.jsonl", "rank-00001.jsonl", "run.json"]
    nodes = {rank: hello.node for rank, hello in all_of(folder, Hello) if isinstance(hello, Hello)}
    assert nodes == {0: 0, 1: 1}


@pytest.mark.needs("hosts")
def test_two_hosts_that_share_no_folder(tmp_path: Path) -> None:
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    for host in hosts:
        host.mkdir()
    first_error, _ = run_two_hosts(hosts)
    assert "the page of the run" in first_error
    (first,), (second,) = [list((host / "runs").iterdir()) for host in hosts]
    names = sorted(path.name for path in (first / "watch").iterdir())
    assert [name.partition(".")[0] for name in names] == ["launcher-0", "launcher-1", "rank-00000", "rank-00001", "run"]
    # The first host has all that the other one has, to the last line: its error, and the end of its launcher.
    for name in ("launcher-1.jsonl", "rank-00001.jsonl"):
        (copy,) = (first / "watch").glob(name.replace(".", ".*."))
        assert copy.read_bytes() == (second / "watch" / name).read_bytes()
    last = {rank: tick.step for rank, tick in all_of(first, Tick) if isinstance(tick, Tick)}
    assert last == {0: 4, 1: 4}
    assert sorted(number for number, _ in all_of(first, LauncherEnded)) == [0, 1]
    assert {rank for rank, _ in all_of(second, Hello)} == {1}
    assert "no such batch" in (first / "report.html").read_text()


LOOP = """
    import time, torch
    from pathlib import Path
    from paceline import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    while not accelerator.reduce(torch.tensor(float(Path("../end").exists()))):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
def test_the_next_launcher_that_leads_has_the_journals_of_all_that_are_left(tmp_path: Path) -> None:
    places = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    hosts = [tmp_path / f"host{node}" for node in range(3)]
    launchers = []
    for host in hosts:
        host.mkdir()
        words = ("--nodes", "2:3", "--procs", 1, "--main-address", ",".join(places), "--watch")
        launchers.append(start(host, *words, script=LOOP))
        until(lambda host=host: host is not hosts[0] or _listens(places[0]))
    until(lambda: len(list(hosts[0].glob("runs/*/watch/rank-0000[12].*.jsonl"))) == 2)
    launchers[0].kill()
    until(lambda: list(tmp_path.glob("host[12]/runs/*/watch/rank-*.*.jsonl")))
    (tmp_path / "end").touch()
    errors = [launcher.communicate(timeout=60)[1] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers[1:]] == [0, 0], errors
    # The one that has joined first leads now.
    leading = 1 if "the page of the run" in errors[1] else 2
    (of_leader,) = hosts[leading].glob("runs/*")
    (of_member,) = hosts[3 - leading].glob("runs/*")
    assert "the page of the run" in errors[leading] and "the page of the run" not in errors[3 - leading]
    for file in (of_member / "watch").glob("rank-*.jsonl"):
        (copy,) = (of_leader / "watch").glob(f"{file.stem}.*.jsonl")
        assert copy.read_bytes() == file.read_bytes()
    assert (of_leader / "report.html").exists() and not (of_member / "report.html").exists()


def _listens(place: str) -> bool:
    address, port = place.split(":")
    with socket.socket() as caller:
        return caller.connect_ex((address, int(port))) == 0
