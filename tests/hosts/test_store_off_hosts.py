"""Two real hosts that train, and a third with the store: each of the two outlives the silent loss of the other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts.network import Host, Network, Started, lacking, paceline, still_running
from hosts.run import Run
from hosts.test_lost_hosts import SCRIPT, TIMEOUT_S, check, rounds, undisturbed, workers  # noqa: F401

LACKING = ", ".join([*lacking(), *(["etcd"] if shutil.which("etcd") is None else [])])
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"no hosts on this machine: {LACKING} missing"),
    pytest.mark.timeout(300),
]
PORTS = {"etcd": 2379, "c10d": 29400}
JOIN_S = 25


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


def store_on(host: Host, kind: str, folder: Path) -> Started:
    """Starts a store."""
    port = PORTS[kind]
    command = f"{paceline()} store --port {port}"
    if kind == "etcd":
        clients, peers = f"http://{host.address}:{port}", f"http://{host.address}:2380"
        command = f"etcd --data-dir {folder}/etcd --listen-client-urls {clients} --advertise-client-urls {clients} "
        command += f"--listen-peer-urls {peers} --initial-advertise-peer-urls {peers} --initial-cluster default={peers}"
    return host.start(f"env PYTHONPATH={os.environ.get('PYTHONPATH', '')} {command}", log=folder / "store.log")


def run_with(kind: str, folder: Path, store: Host, *words: str) -> Run:
    """A run of one or two hosts that has a store; not started yet."""
    (folder / "secret").touch(mode=0o600)
    (folder / "secret").write_text("of this test alone")
    environment = f"env OMP_NUM_THREADS=1 PACELINE_CPU=1 PACELINE_TIMEOUT_S={TIMEOUT_S} "
    environment += f"PYTHONPATH={os.environ.get('PYTHONPATH', '')} PACELINE_RUN_SECRET_FILE={folder}/secret"
    launch = f"{paceline()} launch --nodes 1:2 --max-restarts 5 {' '.join(words)} "
    launch += (
        f"--rdzv-endpoint {kind}://{store.name}:{PORTS[kind]} --rdzv-conf last_call_timeout=20,join_timeout={JOIN_S}"
    )
    return Run(folder, lambda host: f"{environment} {launch} {SCRIPT} {folder} --batch-size 6")


@pytest.mark.parametrize(
    ("kind", "number", "words"),
    [
        ("etcd", 0, ()),
        ("etcd", 1, ("--tls", "yes")),
        pytest.param("c10d", 0, (), marks=pytest.mark.long),
        pytest.param("c10d", 1, (), marks=pytest.mark.long),
    ],
)
def test_each_of_two_hosts_outlives_the_other(
    network: Network,
    tmp_path: Path,
    undisturbed: Callable[[int], dict[int, float]],  # noqa: F811
    kind: str,
    number: int,
    words: tuple[str, ...],
) -> None:
    *pair, third = network.hosts
    lost, left = pair[number], pair[1 - number]
    store = store_on(third, kind, tmp_path)
    run = run_with(kind, tmp_path, third, *words)
    run.wait_for(lambda: third.run(f"ss -Hltn | grep {PORTS[kind]}").stdout, f"the store\n{store.text()}", 30)
    run.start(*pair)
    run.steps(pair, world=2, count=12, timeout_s=90)

    cut = time.time()
    lost.cut()
    cut_s = run.steps([left], world=1, since=cut, count=12)
    run.wait_for(lambda: not workers(lost), "the end of its process")
    run.wait_for(lambda: not lost.processes(), "the end of its launcher", JOIN_S + 30)
    assert "launch-cut-off" in run.told()
    assert {row.world for row in run.rows(lost)} == {2}  # it made no world of its own

    lost.heal()
    back = time.time()
    run.start(lost)
    back_s = run.steps(pair, world=2, since=back, count=12)
    third.cut()  # nobody needs the store while nothing is lost
    steps = len(run.rows())
    run.wait_for(lambda: len(run.rows()) > steps + 100, "it goes on without the store")
    third.heal()
    run.finish(*pair)
    assert [rounds(run, host) for host in (left, lost)] == [3, 2], run.told()
    store.signal("TERM")
    store.wait()
    check(run, network, undisturbed)
    print(f"{kind} {' '.join(words)}: {lost.name} cut {cut_s:.1f} s, back {back_s:.1f} s")
    assert still_running(network.hosts) == {}
