"""Ranks that make no progress, under `paceline launch`: they are reported once, with their stacks, and --on-hang acts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from warm_python import executable

from paceline.base.exits import STUCK

SCRIPT = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    from paceline import Accelerator

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 4000
        def __getitem__(self, index):
            if sys.argv[1] == "worker" and accelerator.process_index == 1 and index > 60:
                time.sleep(600)
            return torch.ones(4)

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=sys.argv[1] == "worker")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
        if step == 5:
            Path(f"{accelerator.process_index}.pid").write_text(str(os.getpid()))
        if step == 10 and accelerator.process_index == 1:
            if sys.argv[1] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if sys.argv[1] == "slow":
                until = time.monotonic() + 5
                while time.monotonic() < until:  # it computes for longer than the limit
                    sum(range(1000))
                sys.exit()
"""


@pytest.fixture
def launch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a run of the script, whose words go to the launcher and, after "--", to the script."""
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    started: list[subprocess.Popen[str]] = []
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE")}
    if "py_spy" not in request.fixturenames:
        env["PATH"] = os.defpath  # py-spy takes seconds

    def start(what: str, *words: str, folder: Path = tmp_path) -> subprocess.Popen[str]:
        command = [executable(), "-m", "paceline.cli.main", "launch", "--procs", "2", *words, "train.py", what]
        more = {"OMP_NUM_THREADS": "1", "PACELINE_RUN_SECRET": "of these tests alone"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=folder, env={**env, **more}, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def await_text(folder: Path, pattern: str) -> str:
    """The text of the first file of this name that has some."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        texts = [path.read_text() for path in sorted(folder.glob(pattern))]
        if any(texts):
            return next(text for text in texts if text)
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} has come")


def test_a_worker_that_hangs_is_named_and_the_run_leaves(tmp_path: Path, launch) -> None:
    run = launch("worker", "--stuck-after", "3", "--on-hang", "leave", "--max-restarts", "3")
    _, errors = run.communicate(timeout=60)
    assert run.returncode == STUCK, errors
    assert errors.count("no rank has made progress for") == 1 and errors.count("[run-stuck]") == 1, errors
    assert "starting all processes again" not in errors
    assert "rank 0: in backward at train.py:" in errors and "accelerator.backward(model(batch).mean())" in errors
    assert "rank 1: in DataLoader.__next__ at train.py:" in errors and "for step, batch in enumerate(loader):" in errors
    assert "its worker process" in errors and "in __getitem__: time.sleep(600)" in errors
    whole = (tmp_path / "stacks-1.txt").read_text()
    assert "==== rank 0, pid" in whole and "_worker_loop" in whole and "all_reduce number" in whole


def test_a_stopped_rank_is_restarted_as_often_as_a_failure(tmp_path: Path, launch) -> None:
    run = launch("stop", "--stuck-after", "2", "--on-hang", "restart", "--max-restarts", "1")
    _, errors = run.communicate(timeout=60)
    assert run.returncode == STUCK, errors
    assert errors.count("starting all processes again (restart 1 of 1)") == 1
    assert errors.count("rank 1: stopped by a signal (SIGSTOP or SIGTSTP; state T); `kill -CONT") == 2
    assert (tmp_path / "stacks-2.txt").exists() and not (tmp_path / "stacks-3.txt").exists()


def test_one_rank_that_computes_is_no_standstill(tmp_path: Path, launch) -> None:
    run = launch("slow", "--stuck-after", "2", "--on-hang", "leave", "--timeout-s", "20")
    _, errors = run.communicate(timeout=60)
    assert "no rank has made progress" not in errors and not list(tmp_path.glob("stacks-*")), errors


@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_sigusr1_reports_once_and_the_run_goes_on(whom: str, tmp_path: Path, launch) -> None:
    run = launch("go on", "--log-dir", "logs")
    pids = [int(await_text(tmp_path, f"{rank}.pid")) for rank in (0, 1)]
    status = Path(f"/proc/{pids[0]}/status").read_text()
    launcher = int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid")))
    os.kill(launcher if whom == "launcher" else pids[1], signal.SIGUSR1)
    whole = await_text(tmp_path / "logs", "stacks-1.txt")
    assert "==== rank 0, pid" in whole and "==== rank 1, pid" in whole
    time.sleep(1.5)
    os.kill(launcher, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert errors.count("stacks of 2 ranks, as SIGUSR1 asked for:") == 1, errors
    assert f"all stacks: {tmp_path}/logs/stacks-1.txt" in errors and not (tmp_path / "logs" / "stacks-2.txt").exists()


@pytest.mark.needs("hosts")
def test_two_hosts_have_one_report(tmp_path: Path, launch, port: int) -> None:
    place = ("--nodes", "2", "--main-address", "127.0.0.1", "--main-port", str(port))
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(tmp_path / "train.py", other)
    words = ("--procs", "1", *place, "--stuck-after", "4", "--on-hang", "leave", "--node-rank")
    runs = [launch("worker", *words, "0"), launch("worker", *words, "1", folder=other)]
    await_text(other, "1.pid")
    runs[1].send_signal(signal.SIGUSR1)  # of the launcher that does not lead
    errors = [run.communicate()[1] for run in runs]  # on a busy machine starting alone takes a minute
    assert errors[0].count("stacks of 2 ranks, as SIGUSR1 asked for:") == 1, errors
    assert errors[0].count("no rank has made progress for") == 1, errors
    host = socket.gethostname()
    assert f"rank 0 on {host}: in backward at train.py:" in errors[0]
    assert f"rank 1 on {host}: in DataLoader.__next__ at " in errors[0]
    assert "its worker process" in errors[0] and "in __getitem__: time.sleep(600)" in errors[0]
    whole = (tmp_path / "stacks-2.txt").read_text()
    assert "==== rank 0, pid" in whole and "==== rank 1, pid" in whole and "_worker_loop" in whole
    assert "reports the stacks of all ranks: as SIGUSR1 asked for" in errors[1]
    assert "all stacks:" not in errors[1] and not list(other.glob("stacks-*"))
    assert errors[0].count("[run-stuck]") == 1


@pytest.fixture
def py_spy() -> None:
    """For a test that needs the program."""
    if shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed")


@pytest.mark.long
def test_py_spy_adds_native_stacks_and_those_of_a_stopped_rank(tmp_path: Path, py_spy, launch) -> None:
    run = launch("stop", "--stuck-after", "2", "--on-hang", "leave")
    _, errors = run.communicate(timeout=60)
    assert "lets it go on; at train.py:" in errors and "os.kill(os.getpid(), signal.SIGSTOP)" in errors, errors
    whole = (tmp_path / "stacks-1.txt").read_text()
    assert "with compiled code (py-spy dump --native):" in whole and "c10d::" in whole


@pytest.mark.long
def test_sigusr1_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    command = [executable(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "go on"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": os.defpath, "TMPDIR": str(tmp_path)}
    with (tmp_path / "said.txt").open("w") as errors:
        run = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=errors, stderr=errors)
        pids = [int(await_text(tmp_path, f"{rank}.pid")) for rank in (0, 1)]
        time.sleep(1.5)
        for pid in pids:  # both get it, and one reports
            os.kill(pid, signal.SIGUSR1)
        whole = await_text(tmp_path, "stacks-1.txt")
        time.sleep(2.5)
        run.terminate()
        run.wait(60)
    assert "==== rank 0, pid" in whole and "==== rank 1, pid" in whole
    assert (tmp_path / "said.txt").read_text().count("stacks of 2 ranks, as SIGUSR1 asked for") == 1
    assert not (tmp_path / "stacks-2.txt").exists()


@pytest.mark.long
@pytest.mark.parametrize("what", ["worker", "stop"])
def test_a_standstill_under_torchrun_is_reported_by_a_rank(what: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    command = [executable(), "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", what]
    settings = {"OMP_NUM_THREADS": "1", "PATH": os.defpath, "TMPDIR": str(tmp_path), "PACELINE_STUCK_AFTER": "3"}
    with (tmp_path / "said.txt").open("w") as errors:
        run = subprocess.Popen(command, cwd=tmp_path, env=os.environ | settings, stdout=errors, stderr=errors)
        whole = await_text(tmp_path, "stacks-1.txt")
        time.sleep(4)
        os.kill(int((tmp_path / "1.pid").read_text()), signal.SIGCONT)
        run.terminate()
        run.wait(60)
    text = (tmp_path / "said.txt").read_text()
    assert text.count("no rank has made progress for") == 1 and not (tmp_path / "stacks-2.txt").exists(), text
    assert "rank 0: in backward at train.py:" in text
    assert ("its worker process" if what == "worker" else "rank 1: stopped by a signal") in text
    assert "==== rank 0, pid" in whole and "==== rank 1, pid" in whole


def test_a_watched_run_has_the_report_in_its_journal(tmp_path: Path, launch) -> None:
    run = launch("stop", "--stuck-after", "2", "--on-hang", "leave", "--watch")
    _, errors = run.communicate(timeout=60)
    assert run.returncode == STUCK, errors
    (journal,) = tmp_path.glob("runs/*/watch/launcher-0.jsonl")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    stuck = next(line for line in lines if line["kind"] == "stuck")
    assert stuck["ranks"] == [1] and "rank 1: stopped by a signal" in stuck["text"]
    assert Path(stuck["file"]).name == "stacks-1.txt" and "==== rank 0" in Path(stuck["file"]).read_text()
    error = next(line for line in lines if line["kind"] == "error")
    assert error["code"] == "run-stuck"
    assert next(line for line in lines if line["kind"] == "end")["exit_code"] == STUCK
