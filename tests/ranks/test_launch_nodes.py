"""Two launchers on one machine, as two nodes would be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

SUM = """
    import os, signal, sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def node(tmp_path: Path, port: int) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the launcher of one node."""
    started: list[subprocess.Popen[str]] = []
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM"))} | {"OMP_NUM_THREADS": "1"}

    def start(rank: int, text: str, *words: object, address: str = "127.0.0.1") -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(dedent(text))
        place = ("--nodes", 2, "--node-rank", rank, "--main-address", address, "--main-port", port, *words)
        command = [sys.executable, "-m", "paceline.cli.main", "launch", *map(str, place), "train.py"]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def ends(*launchers: subprocess.Popen[str], timeout_s: float = 40) -> list[tuple[int, str, str]]:
    told = [each.communicate(timeout=timeout_s) for each in launchers]
    return [(each.returncode, *text) for each, text in zip(launchers, told, strict=True)]


def test_two_nodes_of_unequal_size(node: Callable[..., subprocess.Popen[str]]) -> None:
    text = SUM + "    print(rank, int(total), os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'], flush=True)\n"
    (code0, out0, err0), (code1, out1, err1) = ends(node(0, text, "-n", 1), node(1, text, "-n", 2))
    assert (code0, code1) == (0, 0), err0 + err1
    assert out0 == "0 3 0 0\n"
    assert sorted(out1.splitlines()) == ["1 3 0 1", "2 3 1 1"]


def test_a_failure_stops_the_other_node_at_once(node: Callable[..., subprocess.Popen[str]]) -> None:
    text = SUM + "    if rank == 1: raise ValueError('the cause')\n    time.sleep(60)\n"
    begun = time.monotonic()
    (code0, _, err0), (code1, _, err1) = ends(node(0, text, "-n", 1), node(1, text, "-n", 1))
    assert time.monotonic() - begun < 25
    assert (code0, code1) == (1, 1)
    assert "ValueError: the cause" in err1
    assert "[rank-failed]" in err1
    assert "[node-failed]" in err0
    assert "node 1" in err0
    assert "rank 1 failed" in err0
    assert "Traceback" not in err0


def test_restarts_on_all_nodes(node: Callable[..., subprocess.Popen[str]]) -> None:
    text = SUM + (
        "    if attempt == '0' and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    dist.all_reduce(total)\n"
        "    print('finished in', attempt, flush=True)\n"
    )
    more = ("-n", 1, "--max-restarts", 1)
    (code0, out0, err0), (code1, out1, err1) = ends(node(0, text, *more), node(1, text, *more))
    assert (code0, code1) == (0, 0), err0 + err1
    assert out0 == out1 == "finished in 1\n"


def test_a_node_that_dies_ends_the_other(node: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    text = SUM + "    open(f'{rank}.up', 'w').close()\n    time.sleep(60)\n"
    stays, dies = node(0, text, "-n", 1), node(1, text, "-n", 1)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("*.up"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    dies.kill()
    ((code, _, err),) = ends(stays)
    assert code == 1
    assert "was lost" in err or "node 1" in err, err


def test_nodes_that_disagree(node: Callable[..., subprocess.Popen[str]]) -> None:
    (code0, _, err0), (code1, _, err1) = ends(node(0, SUM, "-n", 1), node(1, SUM, "-n", 1, "--max-restarts", 3))
    assert (code0, code1) == (1, 1)
    for err in (err0, err1):
        assert "nodes disagree about the number of restarts.  [launch-nodes]" in err


def test_a_main_address_that_does_not_answer(node: Callable[..., subprocess.Popen[str]]) -> None:
    begun = time.monotonic()
    ((code, _, err),) = ends(node(1, SUM, "-n", 1, "--rdzv-conf", "timeout=1"))
    assert code == 1
    assert "does not answer" in err
    assert "[launch-address]" in err
    ((code, _, err),) = ends(node(1, SUM, "-n", 1, address="no-such-host.invalid"))
    assert "[launch-address]" in err
    assert time.monotonic() - begun < 30


def test_a_node_that_does_not_come(node: Callable[..., subprocess.Popen[str]]) -> None:
    ((code, _, err),) = ends(node(0, SUM, "-n", 1, "--rdzv-conf", "timeout=1"))
    assert code == 1
    assert "nodes [1] did not come within 1 s.  [launch-address]" in err


def test_interrupting_one_node_ends_both(node: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    text = SUM + "    open(f'{rank}.up', 'w').close()\n    time.sleep(60)\n"
    first, second = node(0, text, "-n", 1), node(1, text, "-n", 1)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("*.up"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    (code0, _, _), (code1, _, err1) = ends(first, second, timeout_s=20)
    assert (code0, code1) == (130, 1), err1


@pytest.mark.filterwarnings("ignore")
def test_torchelastic_brings_nodes_together_and_again_after_a_failure(
    node: Callable[..., subprocess.Popen[str]],
) -> None:
    text = SUM + (
        "    if rank == 1 and not os.path.exists('failed'):\n"
        "        open('failed', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    dist.all_reduce(total)\n"
        "    print('finished in', attempt, 'with', int(total), flush=True)\n"
    )
    more = ("-n", 1, "--max-restarts", 2, "--rdzv-backend", "c10d")
    (code0, out0, err0), (code1, out1, err1) = ends(node(0, text, *more), node(1, text, *more), timeout_s=60)
    assert (code0, code1) == (0, 0), err0 + err1
    for out in (out0, out1):  # a node that restarts because another one did, does not count it as its own attempt
        assert out in ("finished in 0 with 4\n", "finished in 1 with 4\n")
    assert "rank 1 was ended by SIGKILL" in err0 + err1


@pytest.mark.filterwarnings("ignore")
def test_torchelastic_reports_the_failing_rank(node: Callable[..., subprocess.Popen[str]]) -> None:
    more = ("-n", 1, "--rdzv-backend", "c10d")
    text = SUM + "    if rank == 1: sys.exit(5)\n    time.sleep(60)\n"
    (code0, _, err0), (code1, _, err1) = ends(node(0, text, *more), node(1, text, *more), timeout_s=90)
    assert sorted((code0, code1)) == [1, 5], err0 + err1
    assert "[rank-failed]" in err0 + err1
    assert "rank 1 failed with exit code 5." in err0
    assert "rank 1 failed with exit code 5." in err1
    assert "Traceback" not in err0 + err1


def test_too_few_keep_alives_are_refused(node: Callable[..., subprocess.Popen[str]]) -> None:
    ((code, _, err),) = ends(node(0, SUM, "--rdzv-backend", "c10d", "--rdzv-conf", "keep_alive_max_attempt=2"))
    assert code == 1
    assert "[launch-keep-alive]" in err


def test_torchelastic_names_what_it_could_not_reach(node: Callable[..., subprocess.Popen[str]]) -> None:
    more = ("--rdzv-backend", "c10d", "--rdzv-conf", "timeout=1,read_timeout=1", "-n", 1)
    ((code, _, err),) = ends(node(1, SUM, *more, address="192.0.2.77"))
    assert code == 1
    assert "[launch-address]" in err
