"""`paceline deepspeed`: what its flags mean, and real processes of this host."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from warm_python import executable

from paceline.base.errors import PacelineError
from paceline.cli import launch
from paceline.cli.main import parsed, parser_for
from paceline.launch import host
from paceline.launch.job import Job
from paceline_deepspeed import cli as deepspeed

# accelerate's names are served too, where its part is installed.
SERVED = "accelerate,deepspeed" if find_spec("paceline_accelerate") is not None else "deepspeed"
SCRIPT = """
    import json, os, sys, time
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE CUDA_VISIBLE_DEVICES OMP_NUM_THREADS".split()
    cores = len(os.sched_getaffinity(0))
    pid = os.path.exists(f"/tmp/{os.getppid()}.deepspeed")
    found = {"argv": sys.argv[1:], "cores": cores, "pid": pid, **{name: os.environ.get(name) for name in names}}
    os.write(1, (json.dumps(found) + "\\n").encode())
    open("up" + os.environ["RANK"], "w").close()
    if "fail" in sys.argv and os.environ["RANK"] == "1":
        while not os.path.exists("up0"):  # which the launcher ends then
            time.sleep(0.01)
        sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(dedent(SCRIPT))
    for name in ("a.py", "x.py"):
        (tmp_path / name).touch()
    (tmp_path / "hf").write_text(f"{socket.gethostname()} slots=2\nnode1 slots=3\n")
    return tmp_path


def job_for(words: str, monkeypatch: pytest.MonkeyPatch, devices: int = 0, capsys: Any = None, **env: str) -> Job:
    """The job that a command line means; nothing is started."""
    found: list[Job] = []
    monkeypatch.setattr(launch, "carry_out", lambda job, told: found.append(job) or 0)
    monkeypatch.setattr(host, "accelerators", lambda: host.Accelerators("cuda" if devices else "", devices))
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    args = parsed(parser_for("deepspeed"), words.split())
    assert deepspeed.run(args) == 0
    return found[0]


@pytest.mark.parametrize(
    ("words", "devices", "env", "procs", "visible"),
    [
        ("train.py", 0, {}, 1, None),
        ("train.py", 4, {}, 4, None),
        ("--num_gpus 2 train.py", 0, {}, 2, "0,1"),
        ("--num_accelerators 2 train.py", 4, {}, 2, "0,1"),
        ("--include localhost:1,3 train.py", 4, {}, 2, "1,3"),
        ("-i localhost:0,1 train.py", 0, {}, 2, "0,1"),
        ("--exclude localhost:0 train.py", 4, {}, 3, "1,2,3"),
        ("train.py", 8, {"CUDA_VISIBLE_DEVICES": "3,5"}, 2, "3,5"),
        ("--num_gpus 1 train.py", 8, {"CUDA_VISIBLE_DEVICES": "3,5"}, 1, "0"),
        ("-H /dev/null --num_gpus 2 train.py", 0, {}, 2, "0,1"),
        ("--hostfile hf --num_nodes 1 train.py", 0, {}, 2, "0,1"),
        ("--hostfile hf --no_ssh --node_rank 1 --master_addr 127.0.0.1 train.py", 0, {}, 3, "0,1,2"),
    ],
)
def test_processes_of_this_host(
    words: str, devices: int, env: dict[str, str], procs: int, visible: str | None, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = job_for(words, monkeypatch, devices, **env)
    assert (job.procs, job.env.get("CUDA_VISIBLE_DEVICES"), job.compat) == (procs, visible, SERVED)
    assert job.target.on(1).args == ("--local_rank=1",)
    assert job.assignment is None


def test_hosts_that_start_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for("--hostfile hf --no_ssh --node_rank 1 --master_addr 10.0.0.1 train.py", monkeypatch)
    assert (job.node_rank, job.nodes, job.main_address, job.main_port, job.numbered) == (1, 2, "10.0.0.1", 29500, True)
    job = job_for("--num_nodes 3 --num_gpus 2 --no_ssh --node_rank 2 --master_addr h --master_port 7 a.py", monkeypatch)
    assert (job.node_rank, job.nodes, job.procs, job.main_port) == (2, 3, 2, 7)


def test_other_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--hostfile hf -i node1:0,2 --force_multi --ssh_port 2222 --launcher_args=-v --no_local_rank train.py --x"
    job = job_for(words, monkeypatch)
    assert job.assignment is not None
    assert [(at.host, at.ids) for at in job.assignment.hosts] == [("node1", (0, 2))]
    assert (job.reach.port, job.reach.args, job.assignment.local_rank, job.assignment.args) == (
        2222,
        ("-v",),
        False,
        ("--x",),
    )
    assert job.assignment.settings.launch.compat == SERVED


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ("--elastic_training --module --no_python --launcher mpich --num_gpus 0 x.py", ["deepspeed-flag"] * 4),
        ("", ["command-line"]),
        ("--hostfile nowhere x.py", ["hostfile"]),
        ("--num_nodes 2 x.py", ["host-filter"]),
        ("--num_gpus 9 x.py", ["launch-slots"]),
        ("--include localhost:9 x.py", ["host-filter"]),
        ("--hostfile hf --include node1 --num_gpus 2 x.py", ["host-filter"]),
        ("--hostfile hf --no_ssh x.py", ["deepspeed-flag"]),
        ("--hostfile hf --no_ssh --node_rank 2 --master_addr h x.py", ["deepspeed-flag"]),
        ("--hostfile hf --no_ssh --node_rank 1 x.py", ["launch-address"]),
    ],
)
def test_flags_that_cannot_be(words: str, codes: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PacelineError) as caught:
        job_for(words, monkeypatch, devices=4)
    assert [each.code for each in caught.value.problems] == codes


def test_what_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "one").write_text("node9 slots=1\n")
    words = "--hostfile one --no_ssh_check --enable_each_rank_log logs --venv_script v train.py"
    job = job_for(words, monkeypatch)
    assert (job.log_dir, job.tee) == ("logs", {0: 0})
    said = capsys.readouterr().err
    for line in ("node9, the only host, is taken for this one", "--no_ssh_check has no effect", "logs/rankN.out"):
        assert line in said
    job_for(f"-q {words}", monkeypatch)
    assert capsys.readouterr().err == ""


def test_real_processes(folder: Path) -> None:
    command = [executable(), "-m", "paceline.cli.main", "deepspeed", "--num_gpus", "2", "--bind_cores_to_rank"]
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS" and not k.startswith("PACELINE")}
    cores = len(os.sched_getaffinity(0))
    bound = cores >= 2
    command = [*command[: None if bound else -1], "--save_pid", "train.py", "--epochs", "3", "fail"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert "rank 1 failed with exit code 7" in done.stderr, done.stderr
    first, second = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda row: row["RANK"])
    assert first["argv"] == ["--local_rank=0", "--epochs", "3", "fail"]
    assert second["argv"][0] == "--local_rank=1"
    kept = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert {name: second[name] for name in kept} == kept
    assert first["pid"] and second["pid"]
    if bound:
        assert first["cores"] == second["cores"] == cores // 2
