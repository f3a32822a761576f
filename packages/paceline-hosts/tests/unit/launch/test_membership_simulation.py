"""Thousands of drawn schedules of crashes, cuts and returns against the membership protocol, and proof that they find errors.

SIMULATION_SEEDS=FIRST:LAST plays these schedules instead of the usual ones, where pytest is given the name of a case: a
failure prints the command that plays its schedule again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated_network import Fault, Schedule, Simulation, explained, violation_of

from paceline.launch.rounds import Report
from paceline_hosts.membership import state
from paceline_hosts.membership.following import Following
from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.peers import Peers
from paceline_hosts.membership.rules import Rules
from paceline_hosts.membership.search import Search
from paceline_hosts.membership.state import LauncherState, LeaderLost

SEEDS = 1000
CHUNK = 250


def seeds() -> range:
    """The seeds of this run."""
    first, _, last = os.environ.get("SIMULATION_SEEDS", f"0:{SEEDS}").partition(":")
    return range(int(first), int(last))


def play(numbers: range, store: bool = False) -> None:
    """Plays schedules, and explains the first that breaks a promise. Some send their messages as they travel in earnest."""
    for seed in numbers:
        schedule = Schedule.drawn(seed, store)
        problem, _ = violation_of(schedule, on_the_wire=seed % 20 == 0)
        if problem:
            with_store = "_with_a_store" if store else ""
            case = f"{__file__}::test_every_schedule{with_store}_keeps_the_promises"
            again = f"SIMULATION_SEEDS={seed}:{seed + 1} pytest {case}"
            pytest.fail(f"{explained(schedule)}\n\nagain: {again}", pytrace=False)


@pytest.mark.parametrize("first", range(seeds().start, seeds().stop, CHUNK))
@pytest.mark.timeout(0)
def test_every_schedule_keeps_the_promises(first: int) -> None:
    play(range(first, min(first + CHUNK, seeds().stop)))


@pytest.mark.parametrize("first", range(seeds().start, seeds().stop, CHUNK))
@pytest.mark.timeout(0)
def test_every_schedule_with_a_store_keeps_the_promises(first: int) -> None:
    play(range(first, min(first + CHUNK, seeds().stop)), store=True)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", [False, True])
def test_many_more_schedules(store: bool) -> None:
    play(range(SEEDS, SEEDS + 50_000), store)


def test_a_schedule_is_played_again_alike() -> None:
    traces = []
    for _ in range(2):
        simulation = Simulation(7, tracing=True)
        simulation.play(Schedule.drawn(7))
        traces.append(simulation.lines)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 50


# What the simulation has found, with the fewest faults that do it (the table in docs/adr/0021-membership-guarantees.md).

PATIENCE = Rules(join_timeout_s=15.0, grace_s=5.0)
FOUND = {
    "a leader that was stopped takes old ended connections for fresh deaths": Schedule(
        5729, "abc", replace(PATIENCE, least=1, most=3), "a", False, True, True,
        (Fault(0.01, "start", ("a",)), Fault(1.84, "start", ("c",)), Fault(2.88, "start", ("b",)),
         Fault(5.38, "stop", ("a",)), Fault(15.24, "kill", ("c",))),
    ),
    "a round that was proposed to all is begun by one alone": Schedule(
        3297, "abc", replace(PATIENCE, least=3, most=3, max_restarts=3), "abc", False, True, True,
        (Fault(0.82, "start", ("b",)), Fault(1.44, "start", ("c",)), Fault(2.11, "start", ("a",)),
         Fault(2.69, "cut", ("a", "b")), Fault(2.69, "cut", ("a", "c")), Fault(10.51, "mend")),
    ),
    "a leader that has followed before gives a number twice": Schedule(
        935, "abcde", replace(PATIENCE, least=3, most=4, max_restarts=20), "abcde", False, True, True,
        (Fault(0.99, "start", ("a",)), Fault(1.26, "start", ("d",)), Fault(1.37, "start", ("e",)),
         Fault(1.51, "start", ("b",)), Fault(13.62, "start", ("c",)), Fault(20.21, "leave", ("a",)),
         Fault(25.62, "stop", ("d",)), Fault(33.19, "leave", ("c",))),
    ),
    "a leader begins a round without one that waits for a place, and is killed: that one begins the same number": Schedule(
        3989, "abc", replace(PATIENCE, least=1, most=3, max_restarts=20), "abc", True, True, False,
        (Fault(1.9, "start", ("a",)), Fault(2.43, "start", ("b",)), Fault(2.55, "start", ("c",)),
         Fault(7.92, "cut", ("b", "a")), Fault(12.08, "kill", ("c",)), Fault(12.08, "mend"), Fault(13.13, "kill", ("a",))),
    ),
    "a leader and another begin a round without one that waits, and the leader is killed: both others go on": Schedule(
        50, "abc", replace(PATIENCE, least=1, most=3, max_restarts=20), "abc", False, True, False,
        (Fault(1.0, "start", ("a",)), Fault(2.0, "start", ("b",)), Fault(2.5, "start", ("c",)),
         Fault(8.5, "cut", ("a", "b")), Fault(12.96, "mend"), Fault(15.38, "cut", ("b", "c")), Fault(15.38, "kill", ("a",))),
    ),
    "a leader and another begin a round without one that waits, and the leader leaves: both others go on": Schedule(
        22, "abc", replace(PATIENCE, least=1, most=3, max_restarts=20), "abc", False, True, False,
        (Fault(1.0, "start", ("a",)), Fault(2.0, "start", ("b",)), Fault(2.5, "start", ("c",)),
         Fault(8.96, "cut", ("a", "b")), Fault(13.3, "mend"), Fault(13.87, "cut", ("b", "c")), Fault(13.87, "leave", ("a",))),
    ),
    "a leader that others went on without is joined by one of these, and begins a round from what it knew before": Schedule(
        22369, "abcd", replace(PATIENCE, least=1, most=4, max_restarts=20), "a", False, True, True,
        (Fault(0.21, "start", ("c",)), Fault(0.33, "start", ("a",)), Fault(2.27, "start", ("b",)), Fault(2.86, "start", ("d",)),
         Fault(4.09, "cut", ("a", "b")), Fault(4.09, "cut", ("a", "c")), Fault(4.09, "cut", ("a", "d")),
         Fault(15.85, "power off", ("d",)), Fault(15.85, "mend"), Fault(20.4, "cut", ("c", "a")),
         Fault(20.4, "cut", ("c", "b")), Fault(42.53, "continue", ("a",))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_mended(name: str) -> None:
    for seed in (FOUND[name].seed, *range(20)):  # the same faults, under other delays
        schedule = replace(FOUND[name], seed=seed)
        assert violation_of(schedule)[0] == "", explained(schedule)


# What the simulation must find: each breaks one rule of the protocol.


def no_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is left goes on, however few they are."""
    monkeypatch.setattr(state, "has_quorum", lambda present, configurations, dead: True)


def no_earlier_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round needs a majority of itself alone, and not of the one before."""
    propose = Leadership._propose

    def propose_alone(self: Leadership) -> None:
        self.committed = []
        propose(self)

    monkeypatch.setattr(Leadership, "_propose", propose_alone)


def no_waiting_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is decided on before all processes of the last one have ended."""
    step = Leadership.step

    def hasty(self: Leadership, now: float) -> LeaderLost | None:
        for member_id in self.members if self.stage == "halt" else ():
            self.reports.setdefault(member_id, Report("stopped"))
        return step(self, now)

    monkeypatch.setattr(Leadership, "step", hasty)


def no_end_of_the_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that has lost its leader lets its processes run."""
    monkeypatch.setattr(LauncherState, "request_stop", lambda self, how, why: None)


def any_death_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead launcher is left out of the count, though it may have gone on with others before it died."""
    monkeypatch.setattr(Peers, "death_proof_until", lambda self, member_id: float("inf"))


def any_follower_is_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that waits for a place counts its leader's death, though that one may have gone on with others."""
    monkeypatch.setattr(Following, "is_member", property(lambda self: True, lambda self, value: None), raising=False)


def no_giving_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that is cut off waits for ever."""
    monkeypatch.setattr(Search, "end", lambda self, now: None)


# Each with the seed at which the search begins: two need some rare coincidences.
MUTATIONS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    no_quorum: 0,
    no_waiting_for_processes: 0,
    no_earlier_majority: 1600,
    no_end_of_the_lost: 0,
    any_death_counts: 0,
    any_follower_is_a_member: 3800,
    no_giving_up: 0,
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_protocol_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    tried = range(MUTATIONS[mutate], MUTATIONS[mutate] + 2 * SEEDS)
    found = next((seed for seed in tried if violation_of(Schedule.drawn(seed))[0]), None)
    assert found is not None
    if found < 200:
        assert "the fewest faults that do it" in explained(Schedule.drawn(found))
