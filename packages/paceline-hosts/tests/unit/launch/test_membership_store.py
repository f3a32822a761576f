"""Launchers with a store off their hosts: who goes on where half of a run is lost in silence, and what a store cannot do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations

import pytest
from simulated_network import STORE, Fault, Schedule, Simulation, Violation, stored_after, violation_of
from strangers import message, value

from paceline.launch.rounds import Member, Place
from paceline_hosts.membership import errors
from paceline_hosts.membership.rules import Rules, has_quorum
from paceline_hosts.membership.witness import (
    STALE_S,
    BadSignature,
    Record,
    RecordSigner,
    Standing,
    StoreRequest,
    Witness,
)

RULES = Rules(least=1, most=3, max_restarts=3, join_timeout_s=30)
SECRET = "0123456789abcdef"


def run_of(names: str, seed: int = 0, rules: Rules = RULES) -> Simulation:
    network = Simulation(seed, on_the_wire=True, has_store=True)
    for name in names:
        network.start(name, replace(rules, most=len(names)))
    network.run(15, lambda: network.width(*names))
    assert network.width(*names)
    return network


def cut_off(network: Simulation, names: str, everybody: str) -> None:
    """These are cut off from all others, and from the store."""
    for name in names:
        for other in set(everybody + STORE) - set(names):
            network.cut(name, other)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lost", "ab")
def test_of_two_hosts_each_outlives_the_other(lost: str, seed: int) -> None:
    network = run_of("ab", seed)
    left = "ab".replace(lost, "")
    network.off(network.hosts[lost], silently=True)
    network.run(15, lambda: network.width(left))
    assert network.width(left)
    network.start(lost, replace(RULES, most=2))
    network.run(15, lambda: network.width("a", "b"))
    assert network.width("a", "b")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lost", "ab")
def test_of_two_hosts_the_one_that_is_cut_off_ends(lost: str, seed: int) -> None:
    network = run_of("ab", seed)
    left, alone = "ab".replace(lost, ""), network.hosts[lost]
    cut_off(network, lost, "ab")
    network.run(15, lambda: network.width(left))
    assert network.width(left)
    network.run(10)
    assert network.width(left) and alone.running is None
    network.run(60, lambda: alone.gone)
    end = alone.membership.state.end
    assert end is not None and end.error is not None and end.error.code == "launch-cut-off"
    assert "store: no answer" in str(end.error.why)
    assert network.width(left)


@pytest.mark.parametrize("seed", range(5))
def test_where_only_the_link_between_two_is_cut_one_goes_on_and_the_other_joins_later(seed: int) -> None:
    network = run_of("ab", seed)
    network.cut("a", "b")
    network.run(15, lambda: network.width("a") or network.width("b"))
    assert network.width("a") != network.width("b")
    network.run(5)
    assert network.width("a") != network.width("b")
    network.mend()
    network.run(15, lambda: network.width("a", "b"))
    assert network.width("a", "b")


def test_a_launcher_of_another_version_says_so() -> None:
    """It is told by the record, as soon as somebody of the run answers; a record that nobody stands for says nothing."""
    network = run_of("ab")
    assert network.stored is not None
    record = network.signer.verify(network.stored)
    network.stored = network.signer.sign(replace(record, version="9.9", host="there"))
    network.run(1)
    late = network.start("c", replace(RULES, most=2))
    network.run(5, lambda: late.gone)
    assert late.membership.state.end is not None and late.membership.state.end.error is not None
    assert late.membership.state.end.error.code == "launch-version"
    assert "there has 9.9" in str(late.membership.state.end.error.why)


@pytest.mark.parametrize("names", ["abcd"])
def test_any_half_goes_on(names: str) -> None:
    for half in combinations(names, len(names) // 2):
        network = run_of(names)
        lost = [name for name in names if name not in half]
        for name in lost:
            network.off(network.hosts[name], silently=True)
        network.run(15, partial(network.width, *half))
        assert network.width(*half), half


def test_three_go_one_after_another() -> None:
    network = run_of("abc")
    for lost, left in (("a", "bc"), ("c", "b")):
        network.off(network.hosts[lost], silently=True)
        network.run(15, partial(network.width, *left))
        assert network.width(*left)


@pytest.mark.parametrize("fault", ["store down", "store forgets"])
def test_a_run_goes_on_without_its_store_and_restarts_and_ends_at_a_tie(fault: str) -> None:
    network = run_of("ab")
    schedule = Schedule(0, "ab", RULES, "ab", False, True, False, (), True)
    network.strike(schedule, Fault(0, fault))  # type: ignore[arg-type]
    network.run(30)
    assert network.width("a", "b")
    network.hosts["b"].ends("failed", "a fault")  # which all agree about
    network.run(15, lambda: network.hosts["a"].rounds[-1].number == 2 and network.width("a", "b"))
    assert network.width("a", "b")
    left = network.hosts["b"]
    network.off(network.hosts["a"], silently=True)
    network.run(100, lambda: left.gone)
    assert left.gone and left.membership.state.end is not None and left.membership.state.end.error is not None
    assert left.membership.state.end.error.code == "launch-cut-off"
    why = "has lost what it knew of this run" if fault == "store forgets" else "no answer"
    assert why in str(left.membership.state.end.error.why)


def test_who_comes_while_the_store_has_forgotten_finds_the_run() -> None:
    network = run_of("ab", rules=replace(RULES, most=3))
    network.stored = None
    network.run(5)
    network.off(network.hosts["b"])
    network.start("b", replace(RULES, most=2))
    network.run(20, lambda: network.width("a", "b"))
    assert network.width("a", "b")


def test_a_run_of_which_nobody_is_left_is_followed_by_another() -> None:
    network = run_of("ab")
    for name in "ab":
        network.off(network.hosts[name])
    for name in "ba":
        network.start(name, replace(RULES, most=2))
    network.run(STALE_S + 15, lambda: network.width("a", "b"))
    assert network.width("a", "b")
    assert network.hosts["a"].running is not None and network.hosts["a"].running.number == 1


def test_a_run_that_has_ended_leaves_nothing_in_the_store() -> None:
    network = run_of("ab")
    for host in list(network.hosts.values()):
        host.ends("done")
    network.run(10, lambda: not network.hosts)
    network.run(2)
    assert [host.membership.state.end and host.membership.state.end.code for host in network.ended] == [0, 0]
    assert network.stored is None


# The record


def test_quorum_with_a_vote() -> None:
    pairs = [("a", "b")]
    assert has_quorum({"b"}, pairs, set(), True)
    assert not has_quorum({"a"}, pairs, set(), False)  # the first has no more right than others
    assert has_quorum({"a", "b"}, pairs, set(), False)
    assert not has_quorum({"a"}, [("a", "b", "c")], set(), True)
    assert has_quorum({"a"}, [("a", "b", "c")], {"c"}, True)


def test_a_launcher_with_another_store_is_refused() -> None:
    me, other = Member("i", "here", 2), Member("j", "there", 2)
    for theirs in ("", "etcd://t:2379"):
        problem = errors.disagreement(
            me, Rules(1, 2, store="etcd://s:2379"), None, other, Rules(1, 2, store=theirs).common
        )
        assert problem is not None and problem.code == "launch-nodes"
        assert "store (--rdzv-endpoint)" in problem.what
        assert f"there says {theirs or 'none'}" in str(problem.why)


def witness_of(secret: str = SECRET, run: str = "paceline") -> Witness:
    return Witness(RecordSigner(secret, run), "here", lambda: "a life", "store", 0.0)


RECORD = Record("a life", 3, "a", (("10.0.0.1", 4711),))


def asked(witness: Witness, stored: str | None, now: float) -> str | None:
    """Answers the last request as a store does; returns what is stored then."""
    request = witness.requests.pop()
    stored = stored_after(stored, request)
    witness.on_answer(request.key, stored, "", now)
    return stored


def test_a_vote_is_for_one_round_and_one_launcher() -> None:
    a, b = witness_of(), witness_of()
    stored = a.signer.sign(replace(RECORD, number=2, holder="z"))
    for witness in (a, b):
        witness.look(0.0)
        stored = asked(witness, stored, 0.0)
    assert a.vote(Standing("a", 2, 3), 0.1) is None and b.vote(Standing("b", 2, 3), 0.1) is None
    stored = asked(a, stored, 0.2)  # is the first
    stored = asked(b, stored, 0.2)
    assert a.vote(Standing("a", 2, 3), 0.3) is True and b.vote(Standing("b", 2, 3), 0.3) is False
    assert b.vote(Standing("b", 2, 6), 0.3) is False  # it has only proposed higher numbers
    assert b.vote(Standing("b", 2, 4, (3, "c")), 0.3) is False  # that proposal was another's
    assert a.vote(Standing("a", 2, 4), 0.3) is None and a.requests.pop().swaps  # each proposal needs a vote of its own
    for standing in (Standing("b", 3, 4), Standing("b", 2, 4, (3, "a"))):
        b._pending = None
        assert b.vote(standing, 0.3) is None and b.requests.pop().swaps


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "[]",
        "0" * 64 + " {}",
        "\udce9 \x00 ",
        "9" * 2_000_000,
        RecordSigner("another secret of 16", "paceline").sign(RECORD),
        RecordSigner(SECRET, "another run").sign(RECORD),
    ],
    ids=["empty", "short", "json", "zeros", "bytes", "huge", "other secret", "other run"],
)
def test_what_no_launcher_of_this_run_wrote_counts_for_nothing(value: str) -> None:
    witness = witness_of()
    if value:
        with pytest.raises(BadSignature):
            witness.signer.verify(value)
    witness.look(0.0)
    asked(witness, witness.signer.sign(RECORD), 0.0)
    witness.look(2.0)
    asked(witness, value, 2.0)
    assert witness.record is None
    assert witness.why_not
    for number in range(5):
        assert witness.vote(Standing("a", number, number + 1), 2.1) is None
    assert not witness.found("a", ("10.0.0.1", 1), True, 2.1)
    assert not any(request.swaps for request in witness.requests) or not value


def test_a_record_of_the_right_secret_and_the_wrong_form() -> None:
    signer = RecordSigner(SECRET, "paceline")
    for text in ("[]", "{}", "[" * 10_000, '{"life": 5}', "not json", '{"life": NaN}'):
        with pytest.raises(ValueError):
            signer.verify(f"{signer._tag(text)} {text}")


@pytest.mark.parametrize("seed", range(20))
def test_values_at_random_give_no_right(seed: int) -> None:
    """Garbage, changed bytes, other runs' records and old ones again: only a record that was signed gives the vote."""
    draw = random.Random(seed)
    a, other = witness_of(), RecordSigner("another secret of 16", "paceline")
    records = [replace(RECORD, number=number, holder=draw.choice("ab"), beat=number) for number in range(6)]
    signed = [a.signer.sign(record) for record in records]
    now = 0.0
    for _ in range(150):
        now += draw.choice([0.1, 1.5, 5.0])
        text = draw.choice(signed)
        place = draw.randrange(len(text))
        changed = text[:place] + chr(draw.randrange(1, 0x500)) + text[place + 1 :]
        strange = json.dumps(value(draw))
        stored = draw.choice(
            [None, text, changed, text[:place], text * 50, other.sign(RECORD), strange, message(draw).hex()]
        )
        trouble = draw.choice(["", "", "", "no answer"])
        standing = Standing("a", draw.randrange(5), draw.randrange(1, 7), (draw.randrange(6), draw.choice("ab")))
        draw.choice(
            [
                partial(a.look, now),
                partial(a.vote, standing, now),
                partial(a.found, "a", ("10.0.0.9", 1), True, now),
                partial(a.renew, "a", 3, [("10.0.0.9", 1)] * 100, now),
                partial(a.leave, ("10.0.0.9", 1), now),
            ]
        )()
        for request in a.requests:
            assert len(json.dumps(asdict(request))) < 100_000
            a.on_answer(draw.choice([request.key, 99]), stored, trouble, now)
        a.requests.clear()
        right = a.vote(standing, now)
        signed_now = a.record is not None and a.signer.sign(a.record) == a._value
        assert right is not True or (signed_now and a.record == replace(RECORD, **vars(a.record)))
        assert right is not True or (
            a.record is not None and (a.record.number, a.record.holder) == (standing.next, "a")
        )


def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    witness = witness_of()
    witness.look(0.0)
    late = witness.requests.pop()
    witness.look(10.0)
    asked(witness, witness.signer.sign(RECORD), 10.0)
    witness.on_answer(late.key, None, "", 10.1)
    assert witness.record == RECORD
    assert not witness.why_not


def test_a_store_away_is_no_sign_of_a_run_that_is_no_more() -> None:
    """Nobody could renew the record while it was."""
    witness, place = witness_of(), Place(("10.0.0.2", 1))
    stored = witness.signer.sign(RECORD)
    assert not witness.found("b", place, True, 0.0)
    asked(witness, stored, 0.0)
    for second in range(1, 20):
        assert not witness.found("b", place, True, second)
        for request in witness.requests:
            assert not request.swaps
            witness.on_answer(request.key, None, "no answer", second)
        witness.requests.clear()
    witness.found("b", place, True, 30.0)
    asked(witness, stored, 30.0)
    witness.found("b", place, True, 31.0)
    assert not any(request.swaps for request in witness.requests)


def test_a_request_is_what_the_client_reads() -> None:
    assert stored_after("x", StoreRequest(1, True, "x", "y")) == "y"
    assert stored_after("z", StoreRequest(1, True, "x", "y")) == "z"
    assert stored_after("z", StoreRequest(1)) == "z"


# What the simulation must find.


def both_get_the_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store lets everybody go on who asks."""
    monkeypatch.setattr(Witness, "vote", lambda self, mine, now: True)


def a_vote_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that once had the right takes it for its own in later rounds too."""
    vote = Witness.vote

    def once(self: Witness, mine: Standing, now: float) -> bool | None:
        self.once = getattr(self, "once", False) or vote(self, mine, now) is True  # type: ignore[attr-defined]
        return True if self.once else vote(self, mine, now)  # type: ignore[attr-defined]

    monkeypatch.setattr(Witness, "vote", once)


def the_first_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a round with its first goes on without the store, as it does where there is none."""
    from paceline_hosts.membership import state

    monkeypatch.setattr(
        state, "has_quorum", lambda here, sets, dead, vote=None: has_quorum(here, sets, dead, vote or None)
    )


def what_one_proposes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that has proposed rounds, which nobody accepted, takes the vote from those who went on without it."""
    vote = Witness.vote
    monkeypatch.setattr(Witness, "vote", lambda self, mine, now: vote(self, replace(mine, begun=mine.next - 1), now))


def a_store_may_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever record there is counts, though the store has lost its memory."""
    vote = Witness.vote

    def any_life(self: Witness, mine: Standing, now: float) -> bool | None:
        if self.record is not None:
            self.life = self.record.life
        return vote(self, mine, now)

    monkeypatch.setattr(Witness, "vote", any_life)


# Each with the seed at which the search begins.
MUTATIONS = {both_get_the_vote: 0, a_vote_for_ever: 0, the_first_counts_too: 0, what_one_proposes_counts: 0}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_broken_store_is_found(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    seeds = range(MUTATIONS[mutate], MUTATIONS[mutate] + 2000)
    assert any(violation_of(Schedule.drawn(seed, store=True))[0].startswith("Violation") for seed in seeds)


def while_one_is_stopped_the_store_serves_another_run() -> None:
    """One of two has the vote and is cut off; a third reaches nobody, and founds a run; then the other of the two wakes up."""
    network = run_of("ab", rules=replace(RULES, most=3))
    a, b = network.hosts["a"], network.hosts["b"]
    network.cut("a", "b")
    network.freeze(b)
    network.run(15, lambda: network.width("a"))
    for one, other in (("a", STORE), ("a", "c"), ("b", "c")):
        network.cut(one, other)
    network.start("c", replace(RULES, most=2))
    network.run(STALE_S + 10, lambda: network.width("c"))
    assert network.width("c") and a.running is not None
    network.thaw(b)
    network.run(30)


def test_a_store_that_serves_another_run_gives_no_right(monkeypatch: pytest.MonkeyPatch) -> None:
    while_one_is_stopped_the_store_serves_another_run()
    a_store_may_forget(monkeypatch)
    with pytest.raises(Violation, match="two parts of a run go on"):
        while_one_is_stopped_the_store_serves_another_run()
