"""Who takes part, decided without sockets or clocks: launchers of a simulated network, whose faults are scripted or drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.launch.membership import Membership
from paceline.launch.messages import Message, decode, encode
from paceline.launch.rounds import Member, Place, Report, Round, Rules, may_go_on

FAST = Rules(least=1, most=3, max_restarts=3, join_s=60)


class Host:
    """A simulated host: a launcher, and processes that end as they are told."""

    def __init__(self, network: Network, name: str, rules: Rules, contacts: list[str], node: int, saves: bool) -> None:
        self.network, self.name, self.saves = network, name, saves
        network.born += 1
        me = Member(f"{name}.{network.born}", name, 1, name, 1, node)
        places = [(each, 1) for each in contacts]
        founds = contacts[0] == name if node < 0 else node == 0
        self.own = Membership(me, rules, founds, places, network.now, 1000 + network.now)
        self.rounds: list[Round] = []
        self.running = False
        self.ends_at: tuple[float, Report] | None = None
        self.stopped = self.frozen = False
        self.work: Report | None = None
        self.own.rest(Report("new", store_port=network.born), network.now)

    def act(self, now: float) -> None:
        """The launcher's loop."""
        own = self.own
        if self.ends_at is not None and now >= self.ends_at[0]:
            report, self.ends_at, self.running = self.ends_at[1], None, False
            own.rest(replace(report, store_port=int(now * 100)), now)
        if own.begin is not None and not self.running:
            self.rounds.append(own.begin)
            own.begin, self.running = None, True
        if self.running and own.halt is not None:
            how = own.halt[0]
            slow = self.ends_at is None or self.ends_at[0] > now + 2
            if self.ends_at is None or (how == "end" and slow):
                kind = "preempted" if how == "save" and self.saves else "stopped"
                self.ends_at = (now + self.network.draw.uniform(0.1, 1.5), Report(kind))
        if own.end is not None:
            self.network.carry_out(self)
            self.network.off(self)

    def ends(self, kind: str, what: str = "", after_s: float = 0.0) -> None:
        """Its processes end by themselves."""
        if self.running and self.ends_at is None:
            now = self.network.now
            self.ends_at = (now + after_s, Report(kind, what, now))

    def leave(self, how: str = "save") -> None:
        self.own.leave(how, "was asked to end", self.network.now)
        self.ends("preempted" if self.saves else "stopped", after_s=0.5)
        self.leaves = True


class Network:
    """Hosts and the connections between them. A connection is {key: (peer, its key)} on both sides, in order."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.born = 0
        self.hosts: dict[str, Host] = {}
        self.ended: list[Host] = []
        self.wires: dict[tuple[Host, int], tuple[Host, int]] = {}
        self.mail: list[tuple[float, int, Host, Callable[[], None]]] = []
        self.cut: set[frozenset[str]] = set()
        self.count = 0
        self.arrives: dict[tuple[Host, int], float] = {}
        self.keys = 0
        self.rounds: set[int] = set()

    def start(
        self, name: str, rules: Rules = FAST, contacts: str = "a b c", node: int = -1, saves: bool = True
    ) -> Host:
        self.hosts[name] = Host(self, name, rules, contacts.split(), node, saves)
        return self.hosts[name]

    def off(self, host: Host, silently: bool = False) -> None:
        """A launcher ends, or its host is switched off without a word."""
        if self.hosts.get(host.name) is host:
            del self.hosts[host.name]
        self.ended.append(host)
        host.stopped = True
        for (one, key), (other, theirs) in list(self.wires.items()):
            if one is host:
                del self.wires[one, key]
                if not silently:
                    self._post(one, other, theirs, lambda o=other, k=theirs: self._hang_up(o, k))

    def _hang_up(self, host: Host, key: int) -> None:
        self.wires.pop((host, key), None)
        host.own.closed(key, "closed", self.now)

    def _post(self, sender: Host, to: Host, key: int, deliver: Callable[[], None]) -> None:
        """Messages of one connection arrive in order; where the link is cut, they wait until it is mended."""
        at = max(self.now + self.draw.uniform(0.001, 0.05), self.arrives.get((to, key), 0.0))
        self.arrives[to, key] = at
        self.count += 1
        self.mail.append((at, self.count, sender, lambda: None if to.stopped else deliver()))
        self.mail[-1] = (at, self.count, (sender, to), self.mail[-1][3])  # type: ignore[assignment]

    def carry_out(self, host: Host) -> None:
        while host.own.actions:
            kind, key, *rest = host.own.actions.pop(0)
            if kind == "open":
                self._open(host, key, rest[0])
            elif (host, key) in self.wires:
                other, theirs = self.wires[host, key]
                if kind == "send":
                    message = decode(encode(rest[0]))
                    self._post(host, other, theirs, lambda o=other, t=theirs, m=message: self._deliver(o, t, m))
                else:
                    del self.wires[host, key]
                    self._post(host, other, theirs, lambda o=other, t=theirs: self._hang_up(o, t))

    def _deliver(self, host: Host, key: int, message: Message) -> None:
        if (host, key) in self.wires:
            host.own.heard(key, message, self.now)

    def _open(self, host: Host, key: int, place: Place) -> None:
        other = self.hosts.get(place[0])
        if frozenset((host.name, place[0])) in self.cut or place[0] in self.dark:
            return  # no answer comes, ever
        if other is None:
            self._post(host, host, key, lambda: host.own.closed(key, "refused", self.now))
            return
        self.keys += 2
        self.wires[host, key] = (other, self.keys)
        self.wires[other, self.keys] = (host, key)

    dark: frozenset[str] = frozenset()  # hosts without power: nothing answers in their place

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        end = self.now + seconds
        while self.now < end and not until():
            self.now += 0.05
            self.mail.sort(key=lambda each: each[:2])
            for each in [m for m in self.mail if m[0] <= self.now]:
                sender, to = each[2]  # type: ignore[misc]
                if to.frozen or (sender is not to and frozenset((sender.name, to.name)) in self.cut):
                    continue
                self.mail.remove(each)
                each[3]()
                self.carry_out(to)
            for host in list(self.hosts.values()):
                if not host.frozen:
                    if getattr(host, "leaves", False) and not host.running:
                        host.own.bye()
                        self.carry_out(host)
                        self.off(host)
                        continue
                    host.own.tick(self.now)
                    host.act(self.now)
                    self.carry_out(host)
            self.check()

    def check(self) -> None:
        """Never do two parts of a run go on: at most one round has all its members at work."""
        running = {host.own.me.id: host.rounds[-1] for host in self.hosts.values() if host.running}
        for who, decided in running.items():
            self.rounds.add(decided.number)
            whole = [each for each in running.values() if all(running.get(other) == each for other in each.ids)]
            if decided in whole:
                rest = [each for each in whole if who not in each.ids and each.born == decided.born]
                assert not rest, f"two parts go on: {decided.ids} and {rest[0].ids}"

    def width(self, *names: str) -> bool:
        """Whether exactly these hosts run, in one round."""
        found = [self.hosts[name] for name in names if name in self.hosts]
        return (
            len(found) == len(names)
            and all(host.running and host.ends_at is None for host in found)
            and len({host.rounds[-1].number for host in found}) == 1
            and all({m.host for m in host.rounds[-1].members} == set(names) for host in found)
        )


def three(seed: int = 0, **words: Any) -> Network:
    network = Network(seed)
    for name in "abc":
        network.start(name, **words)
    network.run(10, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    return network


def decided(network: Network) -> int:
    return max(network.rounds)


def test_quorum() -> None:
    views = [("a", "b", "c", "d")]
    assert may_go_on({"a", "b"}, views, set())
    assert not may_go_on({"c", "d"}, views, set())
    assert may_go_on({"b", "c"}, views, {"a"})
    assert may_go_on({"d"}, views, {"a", "b", "c"})
    assert not may_go_on({"d"}, views, {"a", "b"})
    assert may_go_on({"c"}, views, {"a", "b"})
    assert not may_go_on({"a"}, [("a",), ("a", "b", "c")], set())


@pytest.mark.parametrize("seed", range(3))
def test_all_come_in_one_round(seed: int) -> None:
    network = three(seed)
    assert decided(network) == 1
    assert network.hosts["b"].rounds[0].members[0].host == "a"
    for host in list(network.hosts.values()):
        host.ends("done")
    network.run(5)
    assert [host.own.end and host.own.end.code for host in network.ended] == [0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_one_host_alone_does_not_wait_for_the_most(seed: int) -> None:
    network = Network(seed)
    network.start("a")
    network.run(10, lambda: network.width("a"))
    assert 2 < network.now < 4
    network.start("b")
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
    network.dark = frozenset({who}) if silently else frozenset()
    network.off(network.hosts[who], silently)
    for name in rest:  # their processes notice too, a little later
        network.hosts[name].ends("failed", "connection closed", after_s=0.3)
    network.run(20, lambda: network.width(*rest))
    assert network.width(*rest)
    assert network.now - begun < (9.5 if silently else 2.5)
    network.run(5)
    assert decided(network) == 2
    network.dark = frozenset()
    network.start(who)
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    assert decided(network) == 3
    assert network.hosts[who].rounds[-1].restarts == 0


def test_the_first_host_comes_back_knowing_no_other_place() -> None:
    network = Network()
    for name in "abc":
        network.start(name, contacts="a")
    network.run(10, lambda: network.width("a", "b", "c"))
    network.off(network.hosts["a"])
    network.run(10, lambda: network.width("b", "c"))
    network.run(3)
    network.start("a", contacts="a")
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    assert decided(network) == 3


def test_a_younger_run_yields_to_the_older() -> None:
    network = Network()
    network.start("a", contacts="a")
    network.start("b", contacts="a")
    network.run(10, lambda: network.width("a", "b"))
    network.off(network.hosts["a"])
    network.run(10, lambda: network.width("b"))
    network.cut.add(frozenset("ab"))
    network.start("a", contacts="a")
    network.run(6)
    assert network.width("a")  # out of reach, it began a run of its own
    assert network.width("b")
    network.cut.clear()
    network.run(20, lambda: network.width("a", "b"))
    assert network.width("a", "b")


@pytest.mark.parametrize("seconds", [1.0, 3.0, 4.0])
@pytest.mark.parametrize("who", ["a", "c"])
def test_a_link_mended_in_time_restarts_nothing(who: str, seconds: float) -> None:
    network = three()
    network.cut = {frozenset((who, other)) for other in "abc" if other != who}
    network.run(seconds)
    network.cut = set()
    network.run(15)
    assert decided(network) == 1


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_a_host_cut_off_rejoins_and_no_two_runs_go_on(who: str) -> None:
    network = three()
    rest = sorted({"a", "b", "c"} - {who})
    alone = network.hosts[who]
    network.cut = {frozenset((who, other)) for other in rest}
    network.run(20, lambda: network.width(*rest))
    assert network.width(*rest)
    network.run(10)
    assert not alone.running
    assert len(alone.rounds) == 1
    network.cut = set()
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c")
    assert decided(network) == 3


def test_cut_off_for_good_ends_with_an_error() -> None:
    network = three()
    alone = network.hosts["c"]
    network.cut = {frozenset("ac"), frozenset("bc")}
    network.run(75)
    assert alone.own.end is not None
    assert alone.own.end.error is not None
    assert alone.own.end.error.code == "launch-cut-off"
    assert network.width("a", "b")


def test_of_two_hosts_the_first_goes_on_and_the_other_does_not() -> None:
    network = Network()
    for name in "ab":
        network.start(name, contacts="a b")
    network.run(10, lambda: network.width("a", "b"))
    network.cut = {frozenset("ab")}
    network.run(20)
    assert network.width("a")
    assert not network.hosts["b"].running
    network.cut.clear()
    network.run(20, lambda: network.width("a", "b"))
    assert network.width("a", "b")


@pytest.mark.parametrize("who", ["a", "b", "c"])
def test_a_launcher_that_was_stopped_for_a_while(who: str) -> None:
    network = three()
    rest = sorted({"a", "b", "c"} - {who})
    network.hosts[who].frozen = True
    network.run(20, lambda: network.width(*rest))
    assert network.width(*rest)
    network.hosts[who].frozen = False
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
    codes = [host.own.end.code for host in network.ended if host is not leaves and host.own.end]
    assert codes == ([75, 75] if saves else [1, 1])


def test_all_preempted_is_the_end() -> None:
    network = three()
    for host in list(network.hosts.values()):
        host.ends("preempted")
    network.run(10, lambda: not network.hosts)
    assert [host.own.end.code for host in network.ended if host.own.end] == [75, 75, 75]


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
    assert all(host.own.end.code == 1 for host in network.ended if host.own.end)


def test_restarts_are_counted_for_all() -> None:
    network = three()
    for count in range(3):
        network.hosts["abc"[count]].ends("failed", f"fault {count}")
        network.run(10, lambda: decided(network) == count + 2 and network.width("a", "b", "c"))  # noqa: B023
    network.off(network.hosts["a"])  # the count survives the leader
    network.run(10, lambda: network.width("b", "c"))
    network.hosts["b"].ends("failed", "fault 3")
    network.run(10, lambda: not network.hosts)
    ends = [host.own.end for host in network.ended if host.own.end]
    assert [end.code for end in ends] == [1, 1]
    assert "fault 3" in ends[0].why


def test_numbers_decide_the_order() -> None:
    network = Network()
    for node, name in ((2, "c"), (1, "b"), (0, "a")):
        network.start(name, replace(FAST, least=3), "a", node)
    network.run(10, lambda: network.width("a", "b", "c"))
    assert [member.host for member in network.hosts["b"].rounds[0].members] == ["a", "b", "c"]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_there_is_one_run_at_the_end(seed: int) -> None:
    """Faults at random times, some on top of each other; then quiet: all hosts are in one round."""
    network = three(seed)
    draw = network.draw
    for _ in range(8):
        fault = draw.choice(["off", "silent", "fail", "cut", "freeze", "leave", "start"])
        names = sorted(network.hosts)
        if names and fault in ("off", "silent", "fail", "freeze", "leave"):
            host = network.hosts[draw.choice(names)]
            if fault == "silent" and len(names) == 3 and not network.cut:
                network.dark = frozenset({host.name})
                network.off(host, silently=True)
            elif fault == "off" and len(names) > 1:
                network.off(host)
            elif fault == "fail" and host.running and host.rounds[-1].restarts < 2:
                host.ends("failed", "a fault")
            elif fault == "freeze":
                host.frozen = True
            elif fault == "leave" and len(names) > 1 and host.running:
                host.leave()
        elif fault == "cut":
            network.cut.add(frozenset(draw.sample("abc", 2)))
        network.run(draw.choice([0.2, 1.0, 4.0, 8.0]))
        if draw.random() < 0.5:
            network.cut.clear()
            network.dark = frozenset()
            for each in network.hosts.values():
                each.frozen = False
            missing = sorted(set("abc") - set(network.hosts))
            if missing and draw.random() < 0.6:
                network.start(draw.choice(missing))
    network.cut.clear()
    network.dark = frozenset()
    for each in network.hosts.values():
        each.frozen = False
    for _ in range(5):  # a launcher that finds too few others ends in the end, and is started again
        network.run(70, lambda: network.width("a", "b", "c"))
        for name in sorted(set("abc") - set(network.hosts)):
            network.start(name)
    network.run(20, lambda: network.width("a", "b", "c"))
    assert network.width("a", "b", "c"), {
        name: (host.running, host.own.leader, host.own.lead is not None) for name, host in network.hosts.items()
    }
