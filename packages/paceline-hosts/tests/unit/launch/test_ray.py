"""What is asked of a Ray cluster, and whether it could ever hold it: decided without one."""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.base.errors import LaunchError
from paceline.config.given import Given
from paceline.config.sources import resolve_launch
from paceline.launch.job import Job
from paceline.launch.launcher import LAUNCHERS
from paceline_hosts.assignment import Assignment
from paceline_hosts.clusters.ray import RaySettings
from paceline_hosts.hostfile import Slots
from paceline_hosts.hosts import job_on_hosts
from paceline_hosts.launchers.ray import cluster
from paceline_hosts.launchers.ray.host import RayHost, reason
from paceline_hosts.launchers.ray.hosts import Demand, RayHosts
from paceline_hosts.launchers.ray.node import NodeActor

NODES = [
    cluster.Node("10.0.0.1", "head", {"CPU": 0.0}),
    cluster.Node("10.0.0.2", "a", {"CPU": 8.0, "GPU": 4.0}),
    cluster.Node("10.0.0.3", "b", {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0}),
]


@pytest.mark.parametrize(
    ("settings", "procs", "gpus", "bundle"),
    [
        (RaySettings(), 4, 0, {"CPU": 4}),
        (RaySettings(ray_cpus=3), 2, 2, {"CPU": 6, "GPU": 2}),
        (RaySettings(ray_resources="a=1,b:c=0.5"), 1, 0, {"CPU": 1, "a": 1.0, "b:c": 0.5}),
    ],
)
def test_a_bundle_holds_a_host(settings: RaySettings, procs: int, gpus: int, bundle: dict[str, float]) -> None:
    assert cluster.bundle_of(settings, procs, gpus) == bundle


@pytest.mark.parametrize(
    ("bundle", "strategy", "count"),
    [
        ({"CPU": 4}, "STRICT_SPREAD", 2),
        ({"CPU": 4}, "SPREAD", 4),
        ({"CPU": 4, "GPU": 2}, "PACK", 3),
        ({"CPU": 1, "GPU": 3}, "STRICT_SPREAD", 1),
        ({"CPU": 1, "accelerator_type:H100": 0.001}, "STRICT_SPREAD", 1),
        ({"CPU": 9}, "PACK", 0),
    ],
)
def test_how_many_hosts_fit(bundle: dict[str, float], strategy: str, count: int) -> None:
    assert cluster.hosts_that_fit(NODES, bundle, strategy) == count


def test_what_is_too_much_is_compared_with_each_node() -> None:
    message = str(cluster.too_small(NODES, {"CPU": 2, "GPU": 8}, "STRICT_SPREAD", 1))
    assert "no node of the Ray cluster is large enough.  [ray-resources]" in message
    assert "b (10.0.0.3) has CPU 8, GPU 2" in message and "--ray-strategy" not in message
    message = str(cluster.too_small(NODES, {"CPU": 4}, "STRICT_SPREAD", 4))
    assert "has room for 2 of 4 hosts" in message and "--ray-strategy pack" in message


def test_waiting_ends_when_a_node_is_lost_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[object] = []
    nodes = iter([NODES, NODES, NODES[:2]])
    group = SimpleNamespace(wait=lambda seconds: False)
    monkeypatch.setattr(cluster, "nodes_of_cluster", lambda: next(nodes))
    monkeypatch.setattr(cluster, "_placed", lambda *asked: group)
    monkeypatch.setitem(sys.modules, "ray.util", SimpleNamespace(remove_placement_group=removed.append))
    with pytest.raises(LaunchError, match="has room for 1 of 2 hosts"):
        cluster.reserve({"CPU": 4}, RaySettings(), 2, 2, lambda: False)
    assert removed == [group]


def job(folder: Path, **settings: object) -> Job:
    (folder / "train.py").touch()
    values = {"launcher": "ray", **settings}
    given = [Given(name, value, "command line", f"--{name}") for name, value in values.items()]
    return job_on_hosts(resolve_launch(given, {}), "train.py", (), {})


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.skipif(find_spec("ray") is None, reason="a launcher that is not installed is refused before")
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"procs": 2}, "1 x (CPU 2, and a GPU for each process if the cluster has any), STRICT_SPREAD"),
        ({"procs": 2, "nodes": "1:3", "cpu": True}, "1 to 3 x (CPU 2), STRICT_SPREAD"),
        ({"gpus_per_node": 4, "nodes": 2, "ray_strategy": "PACK"}, "2 x (CPU 4, GPU 4), PACK"),
    ],
)
def test_a_dry_run_shows_the_placement_group(tmp_path: Path, settings: dict[str, object], line: str) -> None:
    document = LAUNCHERS.get("ray").render(job(tmp_path, **settings)).document
    assert f"placement group: {line}\n" in document


def test_without_ray_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"pip install ray(.|\n)*launch-launcher"):
        job(tmp_path, procs=2)


def received(actor: NodeActor, number: int = 0) -> tuple[bytes, int | None]:
    """All that comes until the end: standard output, and the exit code."""
    data = b""
    while True:
        chunks, code = actor.receive(number, 5)
        number += len(chunks)
        data += b"".join(chunk for stream, chunk in chunks if stream == 1)
        if code is not None:
            return data, code


def test_an_actor_carries_the_conversation_and_gives_again_what_got_lost(tmp_path: Path) -> None:
    actor = NodeActor()
    actor.start(str(tmp_path), {}, b"packed")
    actor.send(b'{"orders": {"version": "0.0.1"}, "node": 0}\n')
    first, code = actor.receive(0, 20)
    assert code is None and b"paceline is" in first[0][1]
    assert actor.receive(0, 1)[0][: len(first)] == first  # asked again, as if the answer had been lost
    assert actor._process is not None and actor._process.stdin is not None
    actor._process.stdin.close()
    assert received(actor, len(first)) == (b"", 1)
    folder = Path(actor._folder)
    (folder / "value1").write_bytes(b"b")
    (folder / "value0").write_bytes(b"a")
    assert actor.values() == {0: b"a", 1: b"b"}
    actor.close()
    assert not folder.exists() and threading.active_count() < 20


def hosts_of(nodes: str | int, codes: list[int | None]) -> RayHosts:
    """Hosts whose launchers have ended so; None for one that was lost."""
    settings = resolve_launch([Given("nodes", nodes, "command line", "--nodes")], {})
    assignment = Assignment(settings, "train.py", (), "/", {}, (Slots("node0", (0,)), Slots("node1", (0,))))
    hosts = RayHosts(Demand(assignment, {"CPU": 1}, 0, 1.0), SimpleNamespace(bundle_count=0))
    for node, code in enumerate(codes):
        host = RayHost(node, None)
        host.code = code
        if code is None:
            host.problems.append("its node died")
        hosts.hosts[node] = host
    return hosts


@pytest.mark.parametrize(
    ("nodes", "ended", "code"),
    [
        (2, [0, 0], 0),
        (2, [0, 7], 7),  # node 0 ended as another failed
        (2, [75, 75], 75),
        (2, [75, 0], 75),
        ("1:2", [0, None], 0),  # went on without it
        ("1:2", [75, 0], 0),  # one saved and ended, and the other went on to the end
        ("1:2", [75, 75], 75),
        ("1:2", [None, 3], 3),
    ],
)
def test_the_exit_code_of_a_run(nodes: str | int, ended: list[int | None], code: int) -> None:
    hosts = hosts_of(nodes, ended)
    assert hosts._exit_code([number for number in ended if number is not None]) == code


def test_a_host_that_cannot_be_done_without_is_missed_although_the_others_end_well() -> None:
    with pytest.raises(LaunchError, match=r"the Ray cluster lost node1\.(.|\n)*its node died"):
        hosts_of(2, [0, None])._exit_code([0])


def test_what_ray_says_of_a_node_without_paceline() -> None:
    text = "The actor died because of an error\n  ModuleNotFoundError: No module named 'paceline'\n" + "x" * 999
    assert reason(RuntimeError(text)) == "paceline is not installed for Python there, or is an older one"
    assert len(reason(RuntimeError("y " * 999))) == 300
