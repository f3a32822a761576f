"""The nodes of a job on one host (`ThisNode`): which round follows which report, without a process or a network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.base.errors import ConfigError
from paceline.base.exits import PREEMPTED
from paceline.launch.job import Job, Target
from paceline.launch.launchers.local import LAUNCHER
from paceline.launch.nodes import NODES, ThisNode, need_part, nodes_of
from paceline.launch.rounds import End, Report, Round


def job(**values: int) -> Job:
    return Job(Target("script", "train.py"), procs=2, **values)  # type: ignore[arg-type]


def never() -> bool:
    return False


@pytest.fixture
def node() -> Iterator[ThisNode]:
    node = ThisNode(job(max_restarts=1))
    node.processes_ended(Report("new"))
    yield node
    node.close()


def next_round(node: ThisNode) -> Round:
    decided = node.next(never)
    assert decided is not None
    return decided


def test_the_first_round_has_this_node_alone(node: ThisNode) -> None:
    first = next_round(node)
    assert (first.number, first.restarts, first.reason) == (1, 0, "")
    assert [member.procs for member in first.members] == [2]
    assert node.index_in(first) == 0 and node.address_of_rank_0(first) == "127.0.0.1" and first.store_port > 0
    assert node.leads and not node.several and node.stacks is None


@pytest.mark.parametrize(
    ("kind", "code"), [("done", 0), ("preempted", PREEMPTED)], ids=["all have ended", "all have saved"]
)
def test_a_run_that_ends(node: ThisNode, kind: str, code: int) -> None:
    next_round(node)
    node.processes_ended(Report(kind))  # type: ignore[arg-type]
    assert node.end is not None and node.end.code == code and node.next(never) is None


def test_a_failure_is_followed_by_a_round_until_no_restart_is_left(node: ThisNode) -> None:
    first = next_round(node)
    node.processes_ended(Report("failed", "rank 1 ended with exit code 3"))
    second = next_round(node)
    assert (second.number, second.restarts, second.founded_at) == (2, 1, first.founded_at)
    assert "rank 1 ended with exit code 3" in second.reason
    node.processes_ended(Report("failed", "rank 0 ended with exit code 4"))
    assert node.end is not None and node.end.code == 1 and "exit code 4" in node.end.why
    assert node.end.member_id == first.members[0].id


def test_a_failure_that_a_restart_cannot_help_ends_the_run(node: ThisNode) -> None:
    next_round(node)
    node.processes_ended(Report("failed", "an anomaly", again=False))
    assert node.end is not None and node.end.code == 1


def test_processes_that_were_stopped_are_no_failure(node: ThisNode) -> None:
    next_round(node)
    node.processes_ended(Report("stopped"))
    assert next_round(node).restarts == 0


def test_a_launcher_that_was_asked_to_end_starts_no_round(node: ThisNode) -> None:
    next_round(node)
    node.leave("save", "SIGTERM")
    assert node.stop_request == ("save", "SIGTERM")
    node.processes_ended(Report("failed", "rank 0 ended"))
    assert node.end is None and node.next(lambda: True) is None


@pytest.mark.needs("hosts")
def test_several_nodes_need_the_part_for_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    several = job(nodes=2)
    need_part(several)
    monkeypatch.setattr(NODES, "names", list)
    for start in (need_part, nodes_of, lambda job: LAUNCHER.submit(LAUNCHER.render(job))):
        with pytest.raises(ConfigError) as caught:
            start(several)
        assert caught.value.code == "part-missing"
    need_part(job())


def test_another_way_to_find_nodes_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `paceline.nodes` has under the name "membership" gets the job of several nodes."""

    class Toy:
        end = End(0)

        @classmethod
        def open_for(cls, job: Job) -> Toy:
            assert job.nodes == 2
            return cls()

    monkeypatch.setattr(NODES, "_added", {"membership": Toy})
    assert isinstance(nodes_of(job(nodes=2)), Toy) and isinstance(nodes_of(job()), ThisNode)
