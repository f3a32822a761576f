"""Who takes part, decided without sockets or clocks: stories of launchers in a simulated network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from simulated_network import Simulation

from paceline.launch.rounds import Member, Report
from paceline_hosts.membership import errors
from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.membership import Membership
from paceline_hosts.membership.messages import Join, Refused
from paceline_hosts.membership.rules import Rules, has_quorum
from paceline_hosts.membership.state import LauncherState

FAST = Rules(least=1, most=3, max_restarts=3, join_timeout_s=60)


def three(seed: int = 0, rules: Rules = FAST, saves: bool = True) -> Simulation:
    network = Simulation(seed, on_the_wire=True)
    for name in "abc":
        network.start(name, rules, saves=saves)
    network.run(10, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    return network


class CountedDict(dict[str, Any]):
    """Launchers that count how often all of them are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[str]:
        self.looks += 1
        return super().__iter__()

    def keys(self) -> Any:
        self.looks += 1
        return super().keys()

    def values(self) -> Any:
        self.looks += 1
        return super().values()

    def items(self) -> Any:
        self.looks += 1
        return super().items()


def decided(network: Simulation) -> int:
    """The number of the last round that all its members ran."""
    return max(last.number for last in network.whole.values())


def test_quorum() -> None:
    configurations = [("a", "b", "c", "d")]
    assert has_quorum({"a", "b"}, configurations, set())
    assert not has_quorum({"c", "d"}, configurations, set())
    assert has_quorum({"b", "c"}, configurations, {"a"})
    assert has_quorum({"d"}, configurations, {"a", "b", "c"})
    assert not has_quorum({"d"}, configurations, {"a", "b"})
    assert has_quorum({"c"}, configurations, {"a", "b"})
    assert not has_quorum({"a"}, [("a",), ("a", "b", "c")], set())


@pytest.mark.parametrize("answer", ["no leader", "redirect"])
def test_a_launcher_of_this_run_counts_more_than_one_with_another_secret(answer: str) -> None:
    of_another_run = {("10.0.0.1", 29500): "secret"}
    problem = errors.mismatch(of_another_run)
    assert problem is not None and problem.code == "launch-secret"
    assert errors.mismatch({**of_another_run, ("10.0.0.2", 29500): answer}) is None


def test_a_leader_does_not_look_at_all_members_for_each_message() -> None:
    network = Simulation(0)
    names = [f"n{number}" for number in range(24)]
    for name in names:
        network.start(name, Rules(least=24, most=24, max_restarts=3), contacts=names[:1])
    membership = network.hosts["n0"].membership
    network.run(10, lambda: isinstance(membership.role, Leadership))
    leadership = membership.role
    assert isinstance(leadership, Leadership)
    kinds = ("members", "waiting", "reports", "by_node")
    counted = {kind: CountedDict(getattr(leadership, kind)) for kind in kinds}
    for kind, launchers in counted.items():
        setattr(leadership, kind, launchers)
    network.run(10, lambda: network.width(*names))
    assert network.width(*names)
    begun = {kind: launchers.looks for kind, launchers in counted.items()}
    assert max(begun.values()) < 12, begun
    for host in list(network.hosts.values()):
        host.ends("done")
    network.run(5)
    assert len(network.ended) == len(names)
    ended = {kind: launchers.looks - begun[kind] for kind, launchers in counted.items()}
    assert max(ended.values()) < 12, ended


def test_two_that_wait_have_not_the_same_number() -> None:
    state = LauncherState(Member("a", "host a", 1, node=0), FAST, True, [], 0.0)
    membership = Membership(state, 0.0)
    membership.processes_ended(Report("new"), 0.0)
    for key, name in ((2, "b"), (4, "c")):
        membership.on_message(key, Join(Member(name, f"host {name}", 1, node=1), FAST.common, 0), 0.0)
    refused = [message for _, key, message in state.peers.actions if key == 4 and isinstance(message, Refused)]
    assert [message.problem.code for message in refused] == ["launch-nodes"]


@pytest.mark.parametrize("seed", range(3))
def test_all_come_in_one_round(seed: int) -> None:
    network = three(seed)
    assert decided(network) == 1
    assert network.hosts["b"].rounds[0].members[0].host == "a"
    for host in list(network.hosts.values()):
        host.ends("done")
    network.run(5)
    assert [host.membership.state.end and host.membership.state.end.code for host in network.ended] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_one_host_alone_does_not_wait_for_the_most(seed: int) -> None:
    network = Simulation(seed, on_the_wire=True)
    network.start("a", FAST)
    network.run(10, lambda: network.width("a"))
    assert 2 < network.now < 4
    network.start("b", FAST)
    network.run(10, lambda: network.width("a", "b"))
    assert network.width("a", "b")
    assert network.hosts["a"].rounds[-1].restarts == 0


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_a_failure_costs_one_round(who: str) -> None:
    network = three()
    network.hosts[who].ends("failed", "rank 1 failed")
    network.run(10, lambda: decided(network) == 2 and network.width("a", "b", "c"))
    assert decided(network) == 2
    assert network.hosts["c"].rounds[-1].restarts == 1
    assert "rank 1 failed" in network.hosts["b"].rounds[-1].reason


@pytest.mark.parametrize("who", ["a", "b", "c"])
@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_host_lost_costs_one_round_and_may_come_back(who: str, silently: bool, seed: int) -> None:
    network = three(seed)
    rest = sorted({"a", "b", "c"} - {who})
    begun = network.now
    network.off(network.hosts[who], silently)
    for name in rest:  # their processes notice too, a little later
        network.hosts[name].ends("failed", "connection closed", after_s=0.3)
    network.run(20, lambda: network.width(*rest))
    assert network.width(*rest)
    assert network.now - begun < (9.5 if silently else 2.5)
    network.run(5)
    assert decided(network) == 2
    network.start(who, FAST)
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    assert decided(network) == 3
    assert network.hosts[who].rounds[-1].restarts == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_host_that_is_back_without_a_launcher_keeps_nobody_from_leading(seed: int) -> None:
    network = three(seed)
    network.off(network.hosts["a"], silently=True)
    network.run(5)
    network.dark.clear()  # it refuses calls now: too late to prove a death
    network.run(15, lambda: network.width("b", "c"))
    assert network.width("b", "c")


def test_the_first_host_comes_back_knowing_no_other_place() -> None:
    network = Simulation(on_the_wire=True)
    for name in "abc":
        network.start(name, FAST, contacts="a")
    network.run(10, lambda: network.width("a", "b", "c"))
    network.off(network.hosts["a"])
    network.run(10, lambda: network.width("b", "c"))
    network.run(3)
    network.start("a", FAST, contacts="a")
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    assert decided(network) == 3


def test_a_younger_run_yields_to_the_older() -> None:
    network = Simulation(on_the_wire=True)
    network.start("a", FAST, contacts="a")
    network.start("b", FAST, contacts="a")
    network.run(10, lambda: network.width("a", "b"))
    network.off(network.hosts["a"])
    network.run(10, lambda: network.width("b"))
    network.cut("a", "b")
    network.start("a", FAST, contacts="a")
    network.run(6)
    assert network.width("a")  # out of reach, it began a run of its own
    assert network.width("b")
    network.mend()
    network.run(20, lambda: network.width("a", "b"))
    assert network.width("a", "b")


@pytest.mark.parametrize("seconds", [1.0, 3.0, 4.0])
@pytest.mark.parametrize("who", ["a", "c"])
def test_a_link_mended_in_time_restarts_nothing(who: str, seconds: float) -> None:
    network = three()
    for other in {"a", "b", "c"} - {who}:
        network.cut(who, other)
    network.run(seconds)
    network.mend()
    network.run(15)
    assert decided(network) == 1


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_a_host_cut_off_rejoins_and_no_two_runs_go_on(who: str) -> None:
    network = three()
    rest = sorted({"a", "b", "c"} - {who})
    alone = network.hosts[who]
    for other in rest:
        network.cut(who, other)
    network.run(20, lambda: network.width(*rest))
    assert network.width(*rest)
    network.run(10)
    assert not alone.running
    assert len(alone.rounds) == 1
    network.mend()
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    assert decided(network) == 3


def test_cut_off_for_good_ends_with_an_error() -> None:
    network = three()
    alone = network.hosts["c"]
    network.cut("a", "c")
    network.cut("b", "c")
    network.run(75)
    assert alone.membership.state.end is not None
    assert alone.membership.state.end.error is not None
    assert alone.membership.state.end.error.code == "launch-cut-off"
    assert network.width("a", "b")


def test_of_two_hosts_the_first_goes_on_and_the_other_does_not() -> None:
    network = Simulation(on_the_wire=True)
    for name in "ab":
        network.start(name, FAST, contacts="ab")
    network.run(10, lambda: network.width("a", "b"))
    network.cut("a", "b")
    network.run(20)
    assert network.width("a")
    assert not network.hosts["b"].running
    network.mend()
    network.run(20, lambda: network.width("a", "b"))
    assert network.width("a", "b")


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_a_launcher_that_was_stopped_for_a_while(who: str) -> None:
    network = three()
    rest = sorted({"a", "b", "c"} - {who})
    network.freeze(network.hosts[who])
    network.run(20, lambda: network.width(*rest))
    assert network.width(*rest)
    network.thaw(network.hosts[who])
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    assert decided(network) == 3


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_a_host_that_is_asked_to_leave(who: str) -> None:
    network = three()
    rest = sorted({"a", "b", "c"} - {who})
    network.hosts[who].leave()
    network.run(20, lambda: network.width(*rest))
    assert network.width(*rest)
    assert decided(network) == 2
    assert network.hosts[rest[0]].rounds[-1].restarts == 0


@pytest.mark.parametrize("who", ["a", "c"])
@pytest.mark.parametrize("saves", [True, False])
def test_too_few_left_after_one_leaves(who: str, saves: bool) -> None:
    network = three(rules=replace(FAST, least=3), saves=saves)
    leaves = network.hosts[who]
    leaves.leave()
    network.run(20, lambda: not network.hosts)
    ends = [host.membership.state.end for host in network.ended if host is not leaves]
    codes = [end.code for end in ends if end]
    assert codes == ([75, 75] if saves else [1, 1])


def test_all_preempted_is_the_end() -> None:
    network = three()
    for host in list(network.hosts.values()):
        host.ends("preempted")
    network.run(10, lambda: not network.hosts)
    assert [host.membership.state.end.code for host in network.ended if host.membership.state.end] == [75, 75, 75]


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_fixed_number_of_hosts_waits_for_the_lost_one(who: str) -> None:
    rules = replace(FAST, least=3)
    network = three(rules=rules)
    network.off(network.hosts[who])
    network.run(10)
    assert not any(host.running for host in network.hosts.values())
    network.start(who, rules)
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.hosts["c"].rounds[-1].restarts == 1
    network = three(rules=replace(rules, max_restarts=0))
    network.off(network.hosts[who])
    network.run(10)
    assert not network.hosts
    assert all(host.membership.state.end.code == 1 for host in network.ended if host.membership.state.end)


def test_restarts_are_counted_for_all() -> None:
    network = three()
    for count in range(3):
        network.hosts["abc"[count]].ends("failed", f"fault {count}")
        network.run(10, lambda: decided(network) == count + 2 and network.width("a", "b", "c"))  # noqa: B023
    network.off(network.hosts["a"])  # the count survives the leader
    network.run(10, lambda: network.width("b", "c"))
    network.hosts["b"].ends("failed", "fault 3")
    network.run(10, lambda: not network.hosts)
    ends = [host.membership.state.end for host in network.ended if host.membership.state.end]
    assert [end.code for end in ends] == [1, 1]
    assert "fault 3" in ends[0].why


def test_numbers_decide_the_order() -> None:
    network = Simulation(on_the_wire=True)
    for node, name in ((2, "c"), (1, "b"), (0, "a")):
        network.start(name, replace(FAST, least=3), "a", node)
    network.run(10, lambda: network.width("a", "b", "c"))
    assert [member.host for member in network.hosts["b"].rounds[0].members] == ["a", "b", "c"]
