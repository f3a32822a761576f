"""From settings that name hosts to the commands that reach them: nothing is started."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from paceline.base.errors import ConfigError, LaunchError
from paceline.cli import main as cli
from paceline.config.given import Given
from paceline.config.sources import resolve_launch
from paceline.launch import host
from paceline.launch.job import Job
from paceline.launch.launcher import LAUNCHERS, Outcome, Rendered
from paceline.launch.make_job import job_of, without_hostfile
from paceline_hosts.assignment import Assignment, assignment_of
from paceline_hosts.hosts import job_on_hosts

ENV = {"HOME": "/nonexistent", "NCCL_DEBUG": "s3cret", "PYTHONPATH": "/a b"}


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "accelerators", host.Accelerators)
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").write_text("node0 slots=2\nnode1 slots=2\n")
    (tmp_path / "train.py").write_text("")
    return "hf"


def told(**flags: object):  # type: ignore[no-untyped-def]
    return resolve_launch([Given(name, str(value), "command line", f"--{name}") for name, value in flags.items()], ENV)


def job(**flags: object) -> Job:
    return job_on_hosts(told(**flags), "train.py", ["--lr", "1"], ENV, local_rank=True)


SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -p 2222"
COMMANDS = {
    "ssh": [f"{SSH} node0", f"{SSH} node1"],
    "pdsh": [f"{SSH} node0", f"{SSH} node1"],
    "openmpi": [
        "mpirun -np 2 --host node0:1,node1:1 --map-by ppr:1:node --bind-to none --mca odls_base_sigkill_timeout 30 "
        "-x PACELINE_ORDERS -x PYTHONPATH --mca plm_rsh_args -p 2222"
    ]
    * 2,
    "slurm": [
        "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 -w node0,node1 --cpu-bind=none --export=ALL --input=all "
        "--kill-on-bad-exit=0 --wait=0 --mpi=none"
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_each_launcher_runs(name: str, hostfile: str) -> None:
    launcher = LAUNCHERS.get(name)
    assert launcher.name == name
    assert launcher.available() == ""
    rendered = launcher.render(job(hostfile=hostfile, launcher=name, ssh_port=2222))
    assert rendered == launcher.render(rendered.job)
    assert len(rendered.steps) == len(COMMANDS[name])
    for step, expected in zip(rendered.steps, COMMANDS[name], strict=True):
        words = " ".join(step)
        assert words.startswith(expected)
        assert f"{sys.executable} -u -m paceline_hosts.remote" in words
        assert "s3cret" not in words  # no value of a variable stands where `ps` shows it
    text = rendered.text()
    assert "   3           1     1  node1" in text
    assert "variables that go along: NCCL_DEBUG, PYTHONPATH" in text
    assert "s3cret" not in text


def test_an_assignment_travels(hostfile: str) -> None:
    assignment = assignment_of(job(hostfile=hostfile, include="node1:1", zero=2, procs="auto"))
    arrived = Assignment.from_message(json.loads(json.dumps(assignment.to_message())))
    assert arrived.hosts == assignment.hosts
    mine, _ = job_of(arrived.settings_of(0, None), arrived.script, arrived.args, ENV)
    assert (mine.procs, mine.nodes, mine.env["CUDA_VISIBLE_DEVICES"]) == (1, 1, "1")
    assert json.loads(mine.env["PACELINE_SETTINGS"])["zero"] == [2, "command line", "--zero"]
    both = assignment_of(job(hostfile=hostfile))
    second, _ = job_of(both.settings_of(1, ("10.0.0.1", 4000)), "train.py", [], ENV)
    assert (second.node_rank, second.nodes, second.main_address, second.main_port) == (1, 2, "10.0.0.1", 4000)


def test_an_environment_that_a_script_sets_up(hostfile: str) -> None:
    told_here = told(hostfile=hostfile)
    made = job_on_hosts(told_here, "train.py", [], ENV, activate="/opt/my env/activate")
    line = LAUNCHERS.get("ssh").render(made).steps[0][-1]
    assert line.startswith("exec bash -c")
    assert "/opt/my env/activate" in line
    assert "python -u -m paceline_hosts.remote" in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"node_rank": 1, "gpu_ids": "0"}, ["node_rank is of one node", "gpu_ids is of one node"]),
        ({"nodes": "1:2"}, ["a range of nodes"]),
        ({"store": "etcd://a:1"}, ["a store is for launchers"]),
    ],
)
def test_settings_of_one_node_beside_a_hostfile(flags: dict[str, object], said: list[str], hostfile: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job(hostfile=hostfile, **flags)
    assert {each.code for each in caught.value.problems} == {"host-flags"}
    assert all(each in str(caught.value) for each in said)


def test_hosts_without_a_hostfile(hostfile: str) -> None:
    with pytest.raises(ConfigError, match="include=node0") as caught:
        without_hostfile(told(include="node0", ssh_port=22))
    assert caught.value.code == "host-flags"
    with pytest.raises(ConfigError, match="hostfile none cannot be read"):
        job(hostfile="none")
    with pytest.raises(ConfigError, match="unknown-name"):
        job(hostfile=hostfile, launcher="pigeon")
    with pytest.raises(ConfigError, match="fix: write kubernetes"):
        job(hostfile=hostfile, launcher="kuberntes")


def test_a_launcher_that_is_not_installed(hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None if name == "mpirun" else name)
    with pytest.raises(LaunchError, match="there is no mpirun") as caught:
        job(hostfile=hostfile, launcher="openmpi")
    assert caught.value.code == "launch-launcher"
    assert "ssh" in str(caught.value)
    assert job(hostfile=hostfile, launcher="openmpi", dry_run=True).nodes > 0, (
        "to see what it would do, it need not be here"
    )


@pytest.mark.needs("deepspeed")
def test_a_launcher_of_ones_own(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Pigeon:
        name = "pigeon"

        def available(self) -> str:
            return ""

        def render(self, job: Job) -> Rendered:
            assert job.assignment is not None
            return Rendered(job, job.target.command, steps=tuple(("pigeon", at.host) for at in job.assignment.hosts))

        def submit(self, rendered: Rendered) -> Pigeon:
            print(rendered.steps)
            return self

        def wait(self) -> Outcome:
            return Outcome(3)

    LAUNCHERS.add("pigeon", Pigeon())
    try:
        assert cli.main(["launch", "--hostfile", hostfile, "--launcher", "pigeon", "train.py"]) == 3
        assert cli.main(["deepspeed", "--hostfile", hostfile, "--launcher", "PIGEON", "train.py"]) == 3
    finally:
        LAUNCHERS.remove("pigeon")
    assert capsys.readouterr().out == "(('pigeon', 'node0'), ('pigeon', 'node1'))\n" * 2


def test_cores_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "core_numbers", lambda: (0, 1, 2, 3, 8))
    bound, _ = job_of(told(procs=2, bind_cores="all"), "train.py", [], ENV)
    assert [each.cores for each in LAUNCHERS.get("local").render(bound).processes] == [(0, 1), (2, 3)]
    assert bound.env["OMP_NUM_THREADS"] == "2"
    named, _ = job_of(told(procs=2, bind_cores="1-2,8"), "train.py", [], ENV)
    assert named.cores == (1, 2, 8)
    for text, reason in (("2-4", "may not use core 4"), ("1", "means 1 cores")):
        with pytest.raises(ConfigError, match=reason) as caught:
            job_of(told(procs=2, bind_cores=text), "train.py", [], ENV)
        assert caught.value.code == "bind-cores"


def test_a_setting_of_a_launcher_that_is_not_used_is_refused(hostfile: str) -> None:
    with pytest.raises(ConfigError, match="partition is a setting of the launcher slurm") as alone:
        without_hostfile(told(partition="long"))
    with pytest.raises(ConfigError, match="the launcher is ssh"):
        job(partition="long", hostfile=hostfile)
    assert "say --on slurm" in str(alone.value)
