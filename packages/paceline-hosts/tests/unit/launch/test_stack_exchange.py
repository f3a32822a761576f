"""One report of the stacks of all hosts: who asks whom, and who is missing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.launch.nodes import GatheredPlaces
from paceline.launch.rounds import Member, Report
from paceline.world.stacks.parse import FramePosition, RankPlace
from paceline_hosts import stack_exchange
from paceline_hosts.membership.following import Following
from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.membership import Membership
from paceline_hosts.membership.messages import Message, StacksAsked, StacksCollected, StacksWanted, decode, encode
from paceline_hosts.membership.rules import Rules
from paceline_hosts.membership.state import LauncherState
from paceline_hosts.stack_exchange import StackExchange


class Launcher:
    """A launcher of node `name`, without a network: what it says is in `sent`."""

    def __init__(self, name: str) -> None:
        self.sent: list[Message] = []
        self.membership = Membership(LauncherState(Member(name, f"host {name}", 1), Rules(most=3), True, (), 0.0), 0.0)
        self.exchange = StackExchange(self.membership, self.pause)
        self.while_it_waits = lambda: None

    def pause(self, seconds: float) -> None:
        self.while_it_waits()

    def hear(self, sender: str, message: Message) -> None:
        heard = decode(encode(message))
        assert isinstance(heard, StacksAsked | StacksWanted | StacksCollected)
        self.membership.stack_messages.append((sender, heard))

    def follow(self) -> None:
        self.membership.state.known_members["a"] = Member("a", "host a", 1)
        following = Following(self.membership.state, "a", 1, True)
        following.send = lambda message: self.sent.append(message)  # type: ignore[method-assign]
        self.membership.role = following

    def lead(self, *connected: str, ended: str = "") -> None:
        known = self.membership.state.known_members
        known.update({member_id: Member(member_id, f"host {member_id}", 1) for member_id in "abc"})
        leadership = Leadership(self.membership.state, ["a", "b", "c"], ("lost", ""), 0.0, 0.0)
        if ended:
            leadership.reports[ended] = Report("done")
        self.membership.role = leadership
        for key, member_id in enumerate(connected):
            self.membership.peers.connection_of[member_id] = key

    def wanted_of(self) -> list[int]:
        """The connections over which it has asked for stacks."""
        actions, self.membership.peers.actions = self.membership.peers.actions, []
        return [key for _, key, message in actions if isinstance(message, StacksWanted)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(stack_exchange, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))


STACKS = RankPlace(2, 7, FramePosition("", "/work/train.py", 3, "main"), stacks="main thread")


def test_a_member_asks_and_all_hosts_answer() -> None:
    leader, member = Launcher("a"), Launcher("b")
    leader.lead("b", "c")
    member.follow()
    member.while_it_waits = lambda: member.hear("a", StacksWanted(1, "why"))
    assert member.exchange.gather("why", lambda: [STACKS]) == GatheredPlaces([STACKS], reporter="host a")
    question, answer = member.sent
    leader.hear("b", question)
    assert leader.exchange.asked() == "why"
    assert leader.exchange.asked() == ""

    def own() -> list[RankPlace]:
        assert leader.wanted_of() == [0, 1]  # all hosts collect at the same time
        leader.hear("b", answer)
        leader.hear("c", StacksAsked("why"))  # the same event, said before it has heard of the report
        leader.hear("c", StacksCollected(1, ()))
        return [replace(STACKS, rank=0)]

    gathered = leader.exchange.gather("why", own)
    assert gathered.places == [replace(STACKS, rank=0, host="host a"), replace(STACKS, host="host b")]
    assert not gathered.notes and leader.exchange.asked() == ""
    assert not member.exchange.wanted()


def test_stacks_that_are_too_long_lose_their_end() -> None:
    member = Launcher("b")
    member.follow()
    member.hear("a", StacksWanted(1, "why"))
    assert member.exchange.wanted() == "why"
    member.exchange.answer([replace(STACKS, stacks="first\n" + "x" * stack_exchange.LONGEST), STACKS])
    (answer,) = member.sent
    assert isinstance(answer, StacksCollected)
    assert answer.places[0].stacks.startswith("first\n") and answer.places[0].stacks.endswith("too long to be sent)")
    assert answer.places[1].stacks == STACKS.stacks and len(encode(answer)) < stack_exchange.LONGEST


def test_a_leader_that_does_not_answer_or_is_lost() -> None:
    member = Launcher("b")
    member.follow()
    silent = member.exchange.gather("why", lambda: [STACKS])
    assert silent.places == [STACKS] and "did not answer" in silent.notes[0]
    member.while_it_waits = lambda: setattr(member.membership, "following", None)
    assert not member.exchange.gather("why", lambda: [STACKS]).reporter
    member.exchange.answer([])
    assert len(member.sent) == 2


def test_a_member_that_is_silent_or_lost_or_has_ended() -> None:
    leader = Launcher("a")
    leader.lead("b", "c", ended="c")
    leader.hear("b", StacksCollected(9, (STACKS,)))  # to a request of before
    gathered = leader.exchange.gather("why", list)
    assert leader.wanted_of() == [0]  # nobody looks there any more
    assert gathered == GatheredPlaces([], ["host b has sent no stacks within 20 s; its ranks are missing here"])

    def lost() -> list[RankPlace]:
        del leader.membership.peers.connection_of["b"]
        return []

    leader.while_it_waits = lambda: pytest.fail("nobody is left to wait for")
    assert leader.exchange.gather("why", lost) == gathered


def test_a_launcher_alone_asks_nobody() -> None:
    alone = Launcher("a")
    assert alone.exchange.gather("why", lambda: [STACKS]) == GatheredPlaces([STACKS], [])
