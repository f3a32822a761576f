"""Hostfiles, what is chosen of them, and what goes along to the hosts: pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.base.errors import ConfigError, LaunchError
from paceline_hosts.hostfile import Slots, choose, read
from paceline_hosts.hosts import forwarded

TEXT = """
# two racks
node0 slots=2
  node1   slots=4   # the big one

user@node2.rack slots=1
"""
HOSTS = read(TEXT, "hf")


def as_text(hosts: tuple[Slots, ...]) -> str:
    return "@".join(f"{at.host}:{','.join(map(str, at.ids))}" for at in hosts)


def test_a_hostfile() -> None:
    assert as_text(HOSTS) == "node0:0,1@node1:0,1,2,3@user@node2.rack:0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["hf names no host"]),
        ("# nothing\n\n", ["hf names no host"]),
        ("a slots=1\nb\n", ["hf:2: 'b' names no host"]),
        ("a slots=0\n", ["hf:1:"]),
        ("a slots=4096\nb slots=99999999\n", ["hf:2 gives a host more than 4096 slots", "slots=99999999"]),
        ("a slots=" + "9" * 10_000, ["hf:1 gives a host more than 4096 slots"]),
        ("a slots=x\nb slots=1\nb slots=2\n-oProxyCommand=x slots=1", ["hf:1:", "hf:2 and hf:3", "hf:4:"]),
    ],
)
def test_a_hostfile_that_cannot_be_read(text: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text, "hf")
    assert {each.code for each in caught.value.problems} == {"hostfile"}
    assert all(each in str(caught.value) for each in said)


PAIR = (Slots("node0", (0, 1)), Slots("node1", (0, 1, 2, 3)))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, "node0:0,1@node1:0,1,2,3"),
        ({"include": "node1"}, "node1:0,1,2,3"),
        ({"include": "node1:2,0,2@node0"}, "node0:0,1@node1:0,2"),
        ({"exclude": "node0"}, "node1:0,1,2,3"),
        ({"exclude": "node1:0,3"}, "node0:0,1@node1:1,2"),
        ({"exclude": "node0:0,1"}, "node1:0,1,2,3"),
        ({"nodes": 1}, "node0:0,1"),
        ({"procs": 3}, "node0:0,1,2@node1:0,1,2"),
        ({"nodes": 1, "procs": 1}, "node0:0"),
        ({"include": "node0:3,5", "open_ended": True}, "node0:3,5"),
    ],
)
def test_what_is_chosen(asked: dict[str, object], expected: str) -> None:
    assert as_text(choose(PAIR, **asked)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"include": "nod1"}, ["no host 'nod1'", "hosts: node0, node1", "write node"]),
        ({"include": "node1:7"}, ["node1 has no slot 7", "its slots: 0,1,2,3"]),
        ({"exclude": "node1:4@x"}, ["no slot 4", "no host 'x'"]),
        ({"include": "node0:"}, ["cannot be read"]),
        ({"include": "node0:a@node0@node0"}, ["cannot be read", "names node0 twice"]),
        ({"exclude": "node0@node1"}, ["no slot is left"]),
        ({"include": "node0", "exclude": "node1"}, ["cannot both be given"]),
        ({"include": "node0", "exclude": "node1", "nodes": 3}, ["--include and --exclude", "a number of", "3 hosts"]),
        ({"nodes": 3}, ["3 hosts are asked for, and there are 2"]),
    ],
)
def test_what_cannot_be_chosen(asked: dict[str, object], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(PAIR, **asked)  # type: ignore[arg-type]
    assert {each.code for each in caught.value.problems} == {"host-filter"}
    assert all(each in str(caught.value) for each in said), caught.value


@pytest.mark.needs("deepspeed")
def test_what_goes_along(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / ".deepspeed_env").write_text("# mine\nTOKEN='s3 cret'\nLEVEL=1\n")
    (here / ".deepspeed_env").write_text("LEVEL=2\n\n")
    env = {"HOME": str(home), "NCCL_DEBUG": "INFO", "PACELINE_ZERO": "2", "TORCHELASTIC_RUN_ID": "x", "AWS_KEY": "no"}
    assert forwarded(env, str(here)) == {"NCCL_DEBUG": "INFO", "PACELINE_ZERO": "2", "TOKEN": "s3 cret", "LEVEL": "2"}
    (here / "mine").write_text("A=1\n")
    assert forwarded({**env, "DS_ENV_FILE": "mine"}, str(here)) == {
        "NCCL_DEBUG": "INFO",
        "PACELINE_ZERO": "2",
        "A": "1",
    }
    (here / "mine").write_text("A=1\nhunter2\n")
    with pytest.raises(LaunchError, match=r"mine:2 sets no variable") as caught:
        forwarded({"DS_ENV_FILE": "mine"}, str(here))
    assert caught.value.code == "launch-env-file"
    assert "hunter2" not in str(caught.value)
