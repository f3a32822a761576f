"""`paceline launch --on ray` and `paceline_hosts.ray.run` on a real cluster of several nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest
from ray_cluster import RayCluster

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra `ray`)"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes under /proc"),
]

MARK = "TORCH_TEST_OF_RAY"  # goes along to all ranks, by which they are found
WITHOUT_TORCH = {"PACELINE_CPU": "1"}  # no node looks for accelerators, which takes an import of torch
TRAIN = """
    import os, torch
    from paceline import Accelerator
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
    names = ("LOCAL_RANK", "GROUP_RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    print(f"rank {accelerator.process_index}: {total.item():g}", *(os.environ.get(name) for name in names))
"""
FAILS = """
    import os, time
    while len([name for name in os.listdir() if name.startswith("begun-")]) < 2:
        open("begun-" + os.environ["RANK"], "w").close()
        time.sleep(0.05)
    if os.environ["RANK"] == "1":
        raise ValueError("a wrong batch")
    time.sleep(60)
"""
WAITS = """
    import os, time
    print("rank", os.environ["RANK"], "waits", flush=True)
    time.sleep(60)
"""
STEPS = """
    import os, sys, time, torch
    from torch.utils.data import DataLoader
    from paceline import Accelerator
    accelerator = Accelerator(cpu=True, project_dir="run")
    torch.manual_seed(0)
    model, data = torch.nn.Linear(4, 1), torch.randn(240, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
    start = accelerator.resume()
    accelerator.print(f"begins at step {start.step} on {accelerator.num_processes}, pid {os.getpid()}", flush=True)
    step = start.step
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        time.sleep(0.1)
        if step % 5 == 0:
            accelerator.save_state()
            accelerator.print(f"saved {step}", flush=True)
        if os.path.exists("enough"):
            break
    accelerator.print(f"ends at step {step}", flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head that runs nothing, and two nodes."""
    with RayCluster() as cluster:
        cluster.add(num_cpus=2)
        cluster.add(num_cpus=2, num_gpus=2)
        yield cluster


@pytest.fixture
def launch(cluster: RayCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Starts commands in a folder of their own; afterwards nothing is left, neither in the cluster nor of processes."""
    for name, text in (("train.py", TRAIN), ("fails.py", FAILS), ("waits.py", WAITS), ("steps.py", STEPS)):
        (tmp_path / name).write_text(dedent(text))
    mark = f"{os.getpid()}-{request.node.name}"
    launch = Launch(cluster, tmp_path, mark)
    yield launch
    for run in launch.runs:
        run.kill()
        run.wait()
    assert cluster.idle() == {"used": {}, "groups": [], "actors": 0}
    assert processes_with(mark) == []


class Launch:
    """Runs `paceline launch --on ray`."""

    def __init__(self, cluster: RayCluster, folder: Path, mark: str) -> None:
        self.folder = folder
        self.environment = {**cluster.environment, MARK: mark}
        self.runs: list[subprocess.Popen[bytes]] = []

    def start(self, *words: object, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "paceline", "launch", "--on", "ray", *map(str, words)]
        env = {**self.environment, **variables}
        with log.open("w") as file:
            run = subprocess.Popen(command, cwd=self.folder, env=env, stdout=file, stderr=file)
        self.runs.append(run)
        return run

    def __call__(self, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline", "launch", "--on", "ray", *map(str, words)]
        env = {**self.environment, **variables}
        try:
            return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=200)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it did not end: {error.output!r} {error.stderr!r}") from None


def processes_with(mark: str) -> list[int]:
    """Processes to which the variable has come, once those that are ending have had a moment."""
    deadline = time.monotonic() + 5
    while True:
        pids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
            except OSError:
                continue
        if not pids or time.monotonic() > deadline:
            return pids
        time.sleep(0.1)


def wait_for(log: Path, pattern: str, count: int = 1, within_s: float = 60) -> re.Match[str]:
    """The match of a pattern that comes `count` times in a log."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        matches = list(re.finditer(pattern, log.read_text()))
        if len(matches) >= count:
            return matches[count - 1]
        time.sleep(0.1)
    raise AssertionError(f"{pattern!r} did not come {count} times:\n{log.read_text()}")


def actor_above(pid: int) -> int:
    """The actor that a rank belongs to."""
    while b"NodeActor" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def test_ranks_of_two_nodes(launch: Launch) -> None:
    done = launch("--nodes", 2, "--procs", 2, "--gpus-per-node", 0, "train.py", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = [
        f"node{node}: [rank{rank}]: rank {rank}: 10 {local} {node} None 1"
        for rank, node, local in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1))
    ]
    assert sorted(done.stdout.splitlines()) == lines
    assert "round 1: 2 nodes" in done.stderr


def test_the_first_failing_rank(launch: Launch) -> None:
    done = launch("--nodes", 2, "--procs", 1, "--gpus-per-node", 0, "fails.py", **WITHOUT_TORCH)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: a wrong batch") == 1, done.stderr
    assert "node1: paceline.LaunchError: rank 1 failed with exit code 1.  [rank-failed]" in done.stderr, done.stderr


@pytest.mark.long
def test_a_killed_actor_of_the_only_host_costs_a_restart(launch: Launch) -> None:
    log = launch.folder / "log"
    run = launch.start("--procs", 2, "--gpus-per-node", 0, "--max-restarts", 1, "steps.py", log=log)
    rank0 = int(wait_for(log, r"\[rank0\]: begins at step 0 on 2, pid (\d+)")[1])
    wait_for(log, "saved 5")
    os.kill(actor_above(rank0), signal.SIGKILL)
    again = int(wait_for(log, r"\[rank0\]: begins at step (\d+) on 2", count=2)[1])
    assert again >= 5 and again % 5 == 0
    wait_for(log, f"saved {again + 5}")
    (launch.folder / "enough").touch()
    assert run.wait(30) == 0, log.read_text()
    assert "all hosts were lost: starting all processes again (0 restarts are left)" in log.read_text()


def test_ctrl_c_ends_everything(launch: Launch, cluster: RayCluster) -> None:
    log = launch.folder / "log"
    run = launch.start("--nodes", 2, "--procs", 1, "--gpus-per-node", 0, "waits.py", log=log, **WITHOUT_TORCH)
    for rank in range(2):
        wait_for(log, f"rank {rank} waits")
    assert any(cluster.ask(left=True).values())
    run.send_signal(signal.SIGINT)
    assert run.wait(30) == 130, log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.long
def test_a_command_that_is_killed_leaves_nothing(launch: Launch) -> None:
    log = launch.folder / "log"
    run = launch.start("--procs", 1, "--gpus-per-node", 0, "steps.py", log=log)
    wait_for(log, r"\[rank0\]: begins at step 0 on 1")
    run.kill()
    run.wait()


FUNCTION = """
    import os, ray
    from paceline import LaunchError
    from paceline_hosts.ray import run

    def rank_of(names):
        return {name: os.environ.get(name) for name in names}

    def fails():
        raise ValueError("from a rank")

    ray.init(log_to_driver=False)
    print(run(rank_of, args=(["RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"],), procs=2))
    try:
        run(fails, gpus_per_node=0)
    except LaunchError as error:
        print(error.problems[0].code)
    print(ray.is_initialized())
"""


def test_a_function_from_a_driver(launch: Launch) -> None:
    (launch.folder / "driver.py").write_text(dedent(FUNCTION))
    command = [sys.executable, "driver.py"]
    done = subprocess.run(
        command, cwd=launch.folder, env=launch.environment, capture_output=True, text=True, timeout=100
    )
    values = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": "0,1"} for rank in range(2)]
    assert done.stdout.splitlines() == [str(values), "rank-failed", "True"], done.stderr
    assert done.stderr.count("ValueError: from a rank") == 1


BAD = [
    (["--ray-address", "127.0.0.1:1"], "ray-cluster", "no Ray cluster answers at 127.0.0.1:1", "connection refused"),
    (["--ray-address", "nowhere"], "ray-cluster", "the address of the Ray cluster cannot be read", "HOST:PORT"),
    (["--gpus-per-node", "8"], "ray-resources", "no node of the Ray cluster is large enough", "has CPU 2, GPU 2"),
    (["--nodes", "9"], "ray-resources", "the Ray cluster has room for", "strategy STRICT_SPREAD"),
    (["--nodes", "9", "--ray-wait-s", "1"], "ray-resources", "the Ray cluster has room for", "--ray-wait-s"),
    (["--no-wait"], "host-flags", "cannot be left alone", "ray job submit"),
]


@pytest.mark.parametrize(
    ("words", "code", "what", "why"), BAD, ids=lambda value: "-".join(value) if type(value) is list else ""
)
def test_what_cannot_be_given(launch: Launch, words: list[str], code: str, what: str, why: str) -> None:
    done = launch("--procs", 1, *words, "train.py")
    assert done.returncode in (1, 2) and f"[{code}]" in done.stderr, done.stderr
    assert what in done.stderr and why in done.stderr
    assert done.stderr.count("why:") < 8 and "Traceback" not in done.stderr


OTHER = """
    import importlib.metadata as metadata
    import paceline.base.version

    version = metadata.version
    paceline.base.version.VERSION = "0.0.7"
    metadata.version = lambda name: "2.0.1" if name == "torch" else version(name)
"""


def test_a_node_with_other_versions_and_one_without_the_script(
    launch: Launch, cluster: RayCluster, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(dedent(OTHER))
    third = cluster.add(num_cpus=1, resources={"odd": 1}, env_vars={"PYTHONPATH": str(tmp_path / "other")})
    try:
        done = launch("--procs", 1, "--ray-resources", "odd=1", "--gpus-per-node", 0, "missing.py")
        assert done.returncode == 1 and "[launch-hosts]" in done.stderr, done.stderr
        assert re.search(r"node0 \([\d.]+\): paceline is 0.0.7 there, and [\d.]+ here", done.stderr)
        done = launch("--nodes", 3, "--procs", 1, "--gpus-per-node", 0, "missing.py")
        assert done.returncode == 1 and "3 of 3 hosts cannot take part; nothing was started" in done.stderr, done.stderr
        assert done.stderr.count("the script 'missing.py' cannot be run (there is no such file") == 2
        assert "torch is 2.0.1 there, and " in done.stderr
    finally:
        cluster.remove(third)


@pytest.mark.long
def test_a_range_of_nodes_survives_a_killed_actor(launch: Launch) -> None:
    log = launch.folder / "log"
    run = launch.start("--nodes", "1:2", "--procs", 1, "--gpus-per-node", 0, "steps.py", log=log)
    rank0 = int(wait_for(log, r"\[rank0\]: begins at step 0 on 2, pid (\d+)")[1])
    wait_for(log, "saved 5")
    os.kill(actor_above(rank0), signal.SIGKILL)
    # Ray gives the lost host's place to a new actor, which joins the other.
    again = int(wait_for(log, r"\[rank0\]: begins at step (\d+) on 2", count=2)[1])
    assert again >= 5
    (launch.folder / "enough").touch()
    assert run.wait(60) == 0, log.read_text()
    assert re.search(r"node0 \([\d.]+\) was lost: ", log.read_text())


@pytest.mark.long
def test_a_range_of_nodes_survives_a_removed_node(launch: Launch, cluster: RayCluster) -> None:
    log = launch.folder / "log"
    third = cluster.add(num_cpus=1)
    run = launch.start("--nodes", "2:3", "--procs", 1, "--gpus-per-node", 0, "steps.py", log=log)
    wait_for(log, r"\[rank0\]: begins at step 0 on 3")
    wait_for(log, "saved 5")
    cluster.remove(third)
    begins = int(wait_for(log, r"\[rank0\]: begins at step (\d+) on 2")[1])
    assert begins >= 5 and begins % 5 == 0
    (launch.folder / "enough").touch()
    assert run.wait(60) == 0, log.read_text()
    assert re.search(r"node\d \([\d.]+\) was lost: ", log.read_text())
