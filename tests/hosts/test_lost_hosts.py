"""Three real hosts, one process each, and what may happen to them: the run goes on with the numbers that it would have had.

After each story: the loss of every step that any process ever did is that of one undisturbed process, every step saw the
whole global batch, each failure began one round and no more, and nothing runs on any host.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from math import isclose
from pathlib import Path

import pytest
from hosts.network import Host, Network, lacking, paceline, still_running
from hosts.run import Run
from warm_python import executable

LACKING = ", ".join(lacking())
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"no hosts on this machine: {LACKING} missing"),
    pytest.mark.timeout(300),
]
SCRIPT = Path(__file__).parent / "scripts" / "lossless.py"
# Between one and three processes, which add a batch in another order in float32. Losses of a long run are around 13 or 0.2.
TOLERANCE = {"rel_tol": 1e-6, "abs_tol": 3e-6}
TIMEOUT_S = 10
PYTHONPATH = os.environ.get("PYTHONPATH", "")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


@pytest.fixture
def run(tmp_path: Path, network: Network) -> Run:
    """A run that can go on with one to three hosts; not started yet."""
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text("of this test alone")
    environment = f"env OMP_NUM_THREADS=1 PACELINE_CPU=1 PACELINE_TIMEOUT_S={TIMEOUT_S} PYTHONPATH={PYTHONPATH}"
    environment += f" PACELINE_RUN_SECRET_FILE={tmp_path}/secret"
    together = "--rdzv-conf last_call_timeout=20"  # at the start; a busy machine is not to split it in two rounds
    launch = f"{paceline()} launch --nodes 1:3 --main-address node0 --max-restarts 5 {together}"
    return Run(tmp_path, lambda host: f"{environment} {launch} {SCRIPT} {tmp_path} --batch-size 4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[int, float]]:
    """Gives the loss of each step of one process that nothing happens to."""

    def losses(steps: int) -> dict[int, float]:
        folder = tmp_path_factory.mktemp("undisturbed")
        options = ["--steps", str(steps), "--pause-s", "0", "--save-every", str(10**9)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE")} | {"OMP_NUM_THREADS": "1"}
        command = [executable(), str(SCRIPT), str(folder), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return {row.step: row.loss for row in Run(folder, str).rows()}

    return losses


def rounds(run: Run, host: Host) -> int:
    """How often processes of this host have begun and done a step."""
    return len({row.begun for row in run.rows(host)})


def workers(host: Host) -> list[str]:
    """The processes of a host that train."""
    return [each for each in host.processes() if SCRIPT.name in each and " launch " not in each]


def listens_at(host: Host) -> set[str]:
    """The addresses at which programs of a host listen, its sshd apart."""
    rows = [line.split() for line in host.run("ss -Hltnp").stdout.splitlines()]
    return {row[3].rpartition(":")[0] for row in rows if "sshd" not in row[-1]}


def check(run: Run, network: Network, undisturbed: Callable[[int], dict[int, float]]) -> None:
    """What must be true after every story."""
    assert still_running(network.hosts) == {}, run.told()
    rows = run.rows()
    losses = undisturbed(max(row.step for row in rows))
    wrong = [(row, losses[row.step]) for row in rows if not isclose(row.loss, losses[row.step], **TOLERANCE)]
    assert not wrong, f"{len(wrong)} of {len(rows)} differ, first {wrong[0]}\n{run.told()}"
    assert {row.batch for row in rows} == {12.0}
    assert {row.step for row in rows} == set(losses)  # none was left out


def test_a_life(
    run: Run, network: Network, undisturbed: Callable[[int], dict[int, float]], record_property: Callable[..., None]
) -> None:
    """A worker killed, a host switched off, the host back again, and then the host lost that the run began on."""
    node0, node1, node2 = network.hosts
    run.start(*network.hosts)
    run.steps(network.hosts, world=3, count=12)
    assert [listens_at(host) for host in network.hosts] == [{host.address} for host in network.hosts]

    killed = run.kill_worker(node1)
    record_property("worker killed, s", again := run.steps(network.hosts, world=3, since=killed))
    assert [rounds(run, host) for host in network.hosts] == [2, 2, 2], run.told()

    off = time.time()
    node2.power_off()
    record_property("host switched off, s", off_s := run.steps([node0, node1], world=2, since=off, count=12))
    assert [rounds(run, host) for host in (node0, node1)] == [3, 3], run.told()

    back = time.time()
    node2.power_on()
    run.start(node2)
    record_property("host back, s", back_s := run.steps(network.hosts, world=3, since=back, count=12))
    assert [rounds(run, host) for host in network.hosts] == [4, 4, 3], run.told()

    off = time.time()
    node0.power_off()
    record_property("first host off, s", first_s := run.steps([node1, node2], world=2, since=off, count=12))
    run.finish(node1, node2)
    assert [rounds(run, host) for host in network.hosts] == [4, 5, 4], run.told()
    check(run, network, undisturbed)
    print(f"worker {again:.1f} s, host off {off_s:.1f} s, back {back_s:.1f} s, first host off {first_s:.1f} s")


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 2])
def test_a_cable_is_pulled_and_plugged_in_again(
    run: Run, network: Network, undisturbed: Callable[[int], dict[int, float]], number: int
) -> None:
    """A short cut is nothing; after a long one the two that see each other go on, and take the third in again."""
    alone = network.hosts[number]
    pair = [host for host in network.hosts if host is not alone]
    run.start(*network.hosts)
    run.steps(network.hosts, world=3, count=12)

    alone.cut()
    time.sleep(2)
    alone.heal()
    rows = len(run.rows(alone))
    run.wait_for(lambda: len(run.rows(alone)) > rows + 40, "it goes on")
    assert [rounds(run, host) for host in network.hosts] == [1, 1, 1], run.told()

    cut = time.time()
    alone.cut()
    cut_s = run.steps(pair, world=2, since=cut, count=12)
    run.wait_for(lambda: not workers(alone), "the end of its process")
    steps_of_pair = len(run.rows(*pair))
    run.wait_for(lambda: len(run.rows(*pair)) > steps_of_pair + 100, "the pair goes on")
    assert [rounds(run, host) for host in (*pair, alone)] == [2, 2, 1], run.told()
    assert {row.world for row in run.rows(alone)} == {3}  # it made no world of its own

    healed = time.time()
    alone.heal()
    healed_s = run.steps(network.hosts, world=3, since=healed, count=12)
    run.finish(*network.hosts)
    assert [rounds(run, host) for host in (*pair, alone)] == [3, 3, 2], run.told()
    check(run, network, undisturbed)
    print(f"{alone.name} cut {cut_s:.1f} s, healed {healed_s:.1f} s")


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 2])
def test_the_power_of_a_host_fails(
    run: Run, network: Network, undisturbed: Callable[[int], dict[int, float]], number: int
) -> None:
    """Nobody hears of it; the host comes back and is started by hand."""
    lost = network.hosts[number]
    others = [host for host in network.hosts if host is not lost]
    run.start(*network.hosts)
    run.steps(network.hosts, world=3, count=12)

    off = time.time()
    lost.power_off(silently=True)
    off_s = run.steps(others, world=2, since=off, count=12)
    lost.power_on()
    back = time.time()
    run.start(lost)
    back_s = run.steps(network.hosts, world=3, since=back, count=12)
    run.finish(*network.hosts)
    assert [rounds(run, host) for host in (*others, lost)] == [3, 3, 2], run.told()
    check(run, network, undisturbed)
    print(f"{lost.name} without power {off_s:.1f} s, back {back_s:.1f} s")


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_host_is_asked_to_leave(
    run: Run, network: Network, undisturbed: Callable[[int], dict[int, float]], number: int
) -> None:
    """SIGTERM, as before a machine is taken away: what was done is saved, the host leaves, the others go on."""
    leaves = network.hosts[number]
    others = [host for host in network.hosts if host is not leaves]
    run.start(*network.hosts)
    run.steps(network.hosts, world=3, count=12)

    asked = time.time()
    run.started[leaves.name].signal("TERM")
    left_s = run.steps(others, world=2, since=asked, count=12)
    assert run.started[leaves.name].wait() == 75, run.told()
    assert leaves.processes() == []
    run.finish(*others)
    assert [rounds(run, host) for host in (*others, leaves)] == [2, 2, 1], run.told()
    steps = [row.step for row in run.rows(others[0])]
    assert steps == sorted(set(steps)), "steps were done again, although there was time to save"
    check(run, network, undisturbed)
    print(f"{leaves.name} leaves, others on after {left_s:.1f} s")


@pytest.mark.long
def test_two_hosts_at_once(run: Run, network: Network, undisturbed: Callable[[int], dict[int, float]]) -> None:
    """Both are switched off; the last one goes on alone."""
    last, *gone = network.hosts
    run.start(*network.hosts)
    run.steps(network.hosts, world=3, count=12)
    off = time.time()
    for host in gone:
        host.power_off()
    off_s = run.steps([last], world=1, since=off, count=12)
    run.finish(last)
    assert rounds(run, last) == 2, run.told()
    check(run, network, undisturbed)
    print(f"two off {off_s:.1f} s")


@pytest.mark.long
def test_nobody_reaches_anybody(run: Run, network: Network, undisturbed: Callable[[int], dict[int, float]]) -> None:
    """The switch fails: no host may go on alone, as each might; when it works again, they find each other."""
    run.start(*network.hosts)
    run.steps(network.hosts, world=3, count=12)
    for host in network.hosts:
        host.cut()
    run.wait_for(lambda: not any(workers(host) for host in network.hosts), "the end of all processes")
    time.sleep(10)
    assert not any(workers(host) for host in network.hosts), run.told()
    healed = time.time()
    for host in network.hosts:
        host.heal()
    healed_s = run.steps(network.hosts, world=3, since=healed, count=12)
    run.finish(*network.hosts)
    assert [rounds(run, host) for host in network.hosts] == [2, 2, 2], run.told()
    check(run, network, undisturbed)
    print(f"switch works again, all on after {healed_s:.1f} s")
