"""Two launchers on one machine, as two nodes would be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from warm_python import executable

SUM = """
    import os, signal, sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
"""


@pytest.fixture
def node(tmp_path: Path, port: int) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the launcher of one node."""
    started: list[subprocess.Popen[str]] = []
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM"))}
    env |= {"OMP_NUM_THREADS": "1", "PACELINE_RUN_SECRET": "of these tests alone"}

    def start(rank: int, text: str, *words: object, address: str = "127.0.0.1") -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(dedent(text))
        place = ("--nodes", 2, "--node-rank", rank, "--main-address", address, "--main-port", port, *words)
        command = [executable(), "-m", "paceline.cli.main", "launch", *map(str, place), "train.py"]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for launcher in started:
        launcher.kill()
        launcher.communicate()


def ends(*launchers: subprocess.Popen[str], timeout_s: float = 100) -> list[tuple[int, str, str]]:
    texts = [launcher.communicate(timeout=timeout_s) for launcher in launchers]
    return [(launcher.returncode, *text) for launcher, text in zip(launchers, texts, strict=True)]


def test_two_nodes_of_unequal_size(node: Callable[..., subprocess.Popen[str]]) -> None:
    text = SUM + "    print(rank, int(total), os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'], flush=True)\n"
    (code0, out0, err0), (code1, out1, err1) = ends(node(0, text, "-n", 1), node(1, text, "-n", 2))
    assert (code0, code1) == (0, 0), err0 + err1
    assert out0 == "0 3 0 0\n"
    assert sorted(out1.splitlines()) == ["1 3 0 1", "2 3 1 1"]


def test_a_failure_stops_the_other_node_at_once(node: Callable[..., subprocess.Popen[str]]) -> None:
    # Rank 0 would sleep for longer than the test may take.
    text = SUM + "    if rank == 1: raise ValueError('the cause')\n    time.sleep(600)\n"
    (code0, _, err0), (code1, _, err1) = ends(node(0, text, "-n", 1), node(1, text, "-n", 1))
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
    assert "nodes [1] did not join within 1 s.  [launch-address]" in err


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
    # Rank 0 must not be in a collective when rank 1 is killed: it would fail by the closed connection, and its launcher may see
    # that before the other one sees the kill. Both therefore look for the file before either goes on.
    text = SUM + (
        "    is_first = not os.path.exists('failed')\n"
        "    dist.barrier()\n"
        "    if is_first and rank == 1:\n"
        "        open('failed', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if is_first:\n"
        "        time.sleep(600)\n"
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


# Three launchers, whose number may change. They are several hosts in all but the network.

TRAIN = """
    import os, signal, sys, time, torch, torch.distributed as dist
    from datetime import timedelta
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    host = os.environ["HOST_NUMBER"]
    open(f"launcher{host}", "w").write(str(os.getppid()))
    if rank == 0:
        open("leads", "w").write(host)
        with open("rounds", "a") as file:
            print(size, os.environ["TORCHELASTIC_RESTART_COUNT"], file=file)
        with open("names", "a") as file:
            print(os.environ["PACELINE_RUN"], file=file)
    while True:
        word = torch.tensor([float(bool(asked)), float(os.path.exists("finish"))])
        dist.all_reduce(word)
        if word[0]:
            sys.exit(75)
        if word[1] == size:
            break
        if rank == 0:
            open("step", "w").write(str(time.time()))
        if os.path.exists("fail") and rank == 1:
            os.unlink("fail")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
"""


class Hosts:
    """Launchers that all get the same command; the place of each is one of a list."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.words = folder, words
        (folder / "train.py").write_text(dedent(TRAIN))
        (folder / "rounds").touch()
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        self.address = ",".join(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)
        for listener in listeners:
            listener.close()
        self.running: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE", "SLURM"))} | {
            "OMP_NUM_THREADS": "1",
            "PACELINE_RUN_SECRET": "of these tests alone",
            "HOST_NUMBER": str(len(self.running)),
        }
        place = ("-n", "1", "--main-address", self.address, *self.words)
        command = [executable(), "-m", "paceline.cli.main", "launch", *place, "train.py"]
        begun = subprocess.Popen(command, cwd=self.folder, env=env, stderr=subprocess.PIPE, text=True)
        self.running.append(begun)
        return begun

    def in_order(self) -> list[subprocess.Popen[str]]:
        """The one that leads, and the others."""
        leads = int((self.folder / "leads").read_text())
        return [self.running[leads], *self.running[:leads], *self.running[leads + 1 :]]

    def signal(self, host: subprocess.Popen[str], number: signal.Signals) -> None:
        """Sends a signal to the launcher itself: `host` is what started it, which passes on only some of them."""
        launcher = self.folder / f"launcher{self.running.index(host)}"
        os.kill(int(launcher.read_text()), number)

    def rounds(self) -> list[str]:
        return (self.folder / "rounds").read_text().splitlines()

    def until(self, *rounds: str) -> None:
        """Waits until these rounds have begun and steps are made, and no others."""
        deadline = time.monotonic() + 60
        while len(self.rounds()) < len(rounds) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.rounds() == list(rounds), [launcher.poll() for launcher in self.running]
        begun = time.time()
        deadline = time.monotonic() + 60
        while self.step() < begun and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.step() >= begun

    def step(self) -> float:
        path = self.folder / "step"
        return float((path.read_text() if path.exists() else "") or 0)

    def finish(self, *still: subprocess.Popen[str]) -> list[str]:
        (self.folder / "finish").touch()
        errors = [launcher.communicate(timeout=40)[1] for launcher in still]
        assert [launcher.returncode for launcher in still] == [0] * len(still), errors
        return errors


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    networks: list[Hosts] = []

    def make(*words: str) -> Hosts:
        networks.append(Hosts(tmp_path, *words))
        return networks[-1]

    yield make
    for launcher in networks[0].running if networks else ():
        launcher.kill()
        launcher.wait()
        assert launcher.stderr is not None
        launcher.stderr.close()


def test_hosts_come_and_go(hosts: Callable[..., Hosts]) -> None:
    network = hosts("--nodes", "1:3", "--max-restarts", "1", "--rdzv-conf", "last_call_timeout=30")  # a busy machine
    for _ in range(3):
        network.start()
    network.until("3 0")
    first, second, third = network.in_order()
    (network.folder / "fail").touch()  # a process is killed: one round, which counts
    network.until("3 0", "3 1")
    first.kill()  # the host that leads is lost: one round, under another
    network.until("3 0", "3 1", "2 1")
    back = network.start()  # and comes back, in the place of the first
    network.until("3 0", "3 1", "2 1", "3 1")
    third.send_signal(signal.SIGTERM)  # preempted: it leaves, the others go on
    assert third.wait(30) == 75
    network.until("3 0", "3 1", "2 1", "3 1", "2 1")
    errors = "".join(network.finish(second, back))
    assert "was ended by SIGKILL" in errors
    assert "(restart 1 of 1)" in errors
    assert "node 0" in errors
    assert "was lost (its connection ended)" in errors
    assert "joined" in errors
    assert "was asked to end by SIGTERM" in errors
    assert "saved and ended" in third.communicate()[1]
    assert len(set((network.folder / "names").read_text().splitlines())) == 1  # one run in all rounds


def test_a_host_that_falls_silent(hosts: Callable[..., Hosts]) -> None:
    network = hosts("--nodes", "2:3", "--rdzv-conf", "keep_alive_interval=0.5,keep_alive_max_attempt=6")
    first, second, third = (network.start() for _ in range(3))
    network.until("3 0")
    network.signal(second, signal.SIGSTOP)
    network.until("3 0", "2 0")
    network.signal(second, signal.SIGCONT)  # it finds that the others went on, and joins them
    network.until("3 0", "2 0", "3 0")
    assert "silent for 3 s" in "".join(network.finish(first, second, third))


def test_all_leave_where_too_few_would_be_left(hosts: Callable[..., Hosts]) -> None:
    network = hosts("--nodes", "2")
    first, second = network.start(), network.start()
    network.until("2 0")
    first.send_signal(signal.SIGTERM)
    assert (first.wait(30), second.wait(30)) == (75, 75)
