"""What a host finds missing for its orders, and what the starter makes of a host that says nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.base.errors import ConfigError
from paceline.config.given import Given
from paceline.config.sources import resolve_launch
from paceline.launch import host
from paceline.launch.make_job import job_of
from paceline_hosts.assignment import Assignment
from paceline_hosts.hostfile import Slots
from paceline_hosts.network.ports import lasting_port
from paceline_hosts.remote import agent
from paceline_hosts.remote.agent import addresses, reachable, survey
from paceline_hosts.remote.channels import HostChannel


@pytest.fixture
def assignment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "accelerators", lambda: host.Accelerators("cuda", 2))
    (tmp_path / "train.py").write_text("")
    told = resolve_launch([], {"HOME": "/nonexistent"})
    hosts = (Slots("node0", (0, 1)), Slots("node1", (1, 2)))
    return Assignment(told, "train.py", (), str(tmp_path), {}, hosts).to_message()


def test_nothing_is_missing(assignment: dict[str, Any]) -> None:
    assert survey(assignment, 0) == []


@pytest.mark.parametrize(
    ("changed", "node", "said"),
    [
        ({"version": "0.0.1", "told": "what a later version may have"}, 0, "paceline is"),
        ({"python": "3.5"}, 0, "3.5 here"),
        ({"cwd": "/nowhere/at/all"}, 0, "the working directory /nowhere/at/all is not there"),
        ({"script": "other.py"}, 0, "the script 'other.py' cannot be run (there is no such file"),
        ({}, 1, "slots 1,2 are asked for, and there are 2 devices"),
    ],
)
def test_what_is_missing(changed: dict[str, Any], node: int, said: str, assignment: dict[str, Any]) -> None:
    (found,) = survey({**assignment, **changed}, node)
    assert said in found


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo 'ssh: Could not resolve hostname x: Name or service not known' >&2; exit 255", "no host of that name"),
        (
            "echo 'connect to host x port 22: Connection timed out' >&2; exit 255",
            "cannot be reached at port 22: no answer",
        ),
        ("echo \"ModuleNotFoundError: No module named 'paceline'\" >&2; exit 1", "paceline is not installed for /py"),
        ("exit 127", "there is no /py there"),
        ("echo what a day >&2; exit 9", "exit code 9: what a day"),
        ("sleep 10", "it did not answer within 3 s"),
    ],
)
def test_a_host_that_does_not_answer(command: str, said: str) -> None:
    channel = HostChannel("x", ("sh", "-c", f"exec 1>&2; {command}"))
    try:
        if "sleep" not in command:
            for stream, pipe in channel.pipes.items():
                output = pipe.read()
                if output:
                    channel.receive(stream, output)
                channel.receive(stream, b"")
            channel._process.wait()
        assert said in channel.why_silent(22, "/py", 3)
    finally:
        channel._process.kill()
        channel.close()


def test_where_a_host_is_reached() -> None:
    with host.hold_port(0) as held:
        held.listen()
        port = held.getsockname()[1]
        assert reachable(["127.0.0.1", "not.a.host.invalid"], port) == ["127.0.0.1"]
    assert reachable(["127.0.0.1"], port) == []
    assert "127.0.0.1" not in addresses(["127.0.0.1"])


def test_a_hostfile_where_only_this_host_counts() -> None:
    told = resolve_launch([], {"HOME": "/nonexistent", "PACELINE_HOSTFILE": "hf"})
    with pytest.raises(ConfigError, match=r"hostfile=hf \(PACELINE_HOSTFILE\)"):
        job_of(told, sys.executable, [], {})
    assert job_of(resolve_launch([Given("cpu", "yes", "command line", "--cpu")], {}), os.devnull, [], {})[0].procs == 1


def test_one_input_for_all_hosts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """srun gives its input to all: what is to others is left out, and answers say from which node they come."""
    channel = agent.StarterChannel()
    channel.node = 1
    sent = b'{"listen": 0, "to": [0]}\n\n{"reach": [], "to": [1, 2]}\n{"signal": 15}\n'
    monkeypatch.setattr(agent.os, "read", lambda number, size: sent)
    assert channel.receive_available() == [{"reach": [], "to": [1, 2]}, {"signal": 15}]
    monkeypatch.undo()
    channel.answer(reached=["10.0.0.1"])
    assert capfd.readouterr().out == f'{agent.MARK}{{"reached": ["10.0.0.1"], "node": 1}}\n'


def test_a_port_that_nobody_is_given() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert 10_000 <= lasting_port() < int(first)
