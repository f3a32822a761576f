"""Strangers at a launcher's port: whatever they send, the run is as it would have been without them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from strangers import ONE_LINERS, Stranger, one_liners

STEPS = 40
TRAIN = f"""
    import os, time, torch, torch.distributed as dist
    from paceline.world import rendezvous
    from paceline.world.world import World
    rendezvous.join(World.detect(), cpu=True)
    rank, weight = dist.get_rank(), torch.zeros(1)
    open(f"{{rank}}.up", "w").close()
    enough = torch.zeros(1)
    step = 0
    while step < {STEPS} or not enough.item():
        gradient = (weight - step - rank) * 0.125
        dist.all_reduce(gradient)
        weight -= gradient
        if rank == 0 and step < {STEPS}:
            print(f"{{step}} {{weight.item():.9f}}", flush=True)
        enough.fill_(os.path.exists("enough"))
        dist.all_reduce(enough)
        step += 1
        time.sleep(0.01)
"""


def losses() -> str:
    """What rank 0 prints in a run that nobody disturbs: all numbers are exact in float32 for long enough to compare."""
    import torch

    weight, lines = torch.zeros(1), []
    for step in range(STEPS):
        weight -= (weight - step) * 0.125 + (weight - step - 1) * 0.125
        lines.append(f"{step} {weight.item():.9f}\n")
    return "".join(lines)


@pytest.fixture
def node(tmp_path: Path, port: int) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the launcher of one node."""
    started: list[subprocess.Popen[str]] = []
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM"))} | {"OMP_NUM_THREADS": "1"}
    (tmp_path / "train.py").write_text(dedent(TRAIN))

    def start(rank: int, *words: object, home: str = "home") -> subprocess.Popen[str]:
        place = ("--nodes", 2, "--node-rank", rank, "--main-address", "127.0.0.1", "--main-port", port, "-n", 1)
        command = [sys.executable, "-m", "paceline.cli.main", "launch", *map(str, (*place, *words)), "train.py"]
        own = env | {"HOME": str(tmp_path / home)}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=tmp_path, env=own, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def wait_for(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def listening(port: int) -> bool:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("count", "tls"),
    [(2000, "yes"), pytest.param(100_000, "no", marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_a_run_among_strangers(
    node: Callable[..., subprocess.Popen[str]], port: int, tmp_path: Path, count: int, tls: str
) -> None:
    first, stranger = node(0, "--tls", tls), Stranger(port)
    wait_for(lambda: listening(port))
    assert list(one_liners(port)) == list(ONE_LINERS)
    stranger.send(count // 3)  # before the other node is admitted
    assert first.poll() is None, first.communicate()

    # While it is: of another secret, which is told so, and then of this one.
    other = node(1, "--tls", tls, home="elsewhere")
    begun = time.monotonic()
    while other.poll() is None and time.monotonic() - begun < 60:
        stranger.send(2)
        time.sleep(0.02)
    assert "has another secret than this one.  [launch-secret]" in other.communicate()[1]
    second = node(1, "--tls", tls)
    up = [tmp_path / "0.up", tmp_path / "1.up"]
    while not all(each.exists() for each in up) and None is first.poll() is second.poll():
        stranger.send(2)
        time.sleep(0.02)

    stranger.send(max(count - stranger.sent, count // 3))  # after it was, while the ranks compute
    stranger.close()
    (tmp_path / "enough").touch()
    (out, err), (_, err1) = first.communicate(timeout=60), second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), err + err1
    assert out == losses()
    assert stranger.sent >= count
    told = [line for line in err.splitlines() if "did not prove this run's secret" in line]
    assert 2 <= len(told) <= 6, err  # at 1, 10, 100, ...
    assert not [line for line in err.splitlines() if not line.startswith("paceline: ")], err
    secret = tmp_path / "home" / ".paceline" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
