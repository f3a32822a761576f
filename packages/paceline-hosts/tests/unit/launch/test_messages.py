"""What launchers say to each other: read strictly, and harmless to the membership whatever is said, and by whom."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import strangers

from paceline.base.errors import Problem
from paceline.base.json_fields import hints
from paceline.launch.rounds import End, Member, Report, Round
from paceline_hosts.membership import messages
from paceline_hosts.membership.membership import Membership
from paceline_hosts.membership.messages import Join, Message, Proposal, RunEnded, StopProcesses, decode, encode
from paceline_hosts.membership.rules import Rules
from paceline_hosts.membership.state import LauncherState

A, B = Member("a", "host a", 1, "10.0.0.1", 1), Member("b", "host b", 2, "10.0.0.2", 2)


@pytest.mark.parametrize(
    "message",
    [
        Join(A, (1, 3, 0, "paceline", "etcd://s:2379"), 0),
        Proposal(Round(1, 0, (A, B), 29500, "a failed", 1.5), (("a",), ("a", "b"))),
        RunEnded(End(1, "why", "a", Problem("launch-nodes", "what", ("one", "two"), "fix"))),
        RunEnded(End(0)),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_round_is_encoded_once_for_all_its_members() -> None:
    proposal = Proposal(Round(1, 0, (A, B)), ())
    assert encode(proposal) is encode(proposal)


@pytest.mark.parametrize(
    "text",
    [
        "{}", "5", "[]", '"stopprocesses"', '{"kind": 5}', '{"kind": []}', '{"kind": "nothing"}', "[" * 100_000, "1" * 5000,
        '{"kind": "stopprocesses", "how": "save"}', '{"kind": "stopprocesses", "how": "later", "why": ""}',
        '{"kind": "stopprocesses", "how": "save", "why": "", "more": 1}', '{"kind": "accept", "round": true}',
        '{"kind": "accept", "round": 1.5}', '{"kind": "accept", "round": -1}', '{"kind": "switchrun", "place": ["x"]}',
        '{"kind": "switchrun", "place": ["x", 65536]}',
        '{"kind": "status", "member_id": "x", "round": 0, "leads": 0, "founded_at": 0}',
        '{"kind": "status", "member_id": "x", "round": 0, "leads": true, "founded_at": NaN}',
        '{"kind": "status", "member_id": "x", "round": 0, "leads": true, "founded_at": 1e999}',
        '{"kind": "leave", "why": "' + "x" * (1 << 20) + 'x"}', '{"kind": "processesended", "report": 5}',
    ],
)  # fmt: skip
def test_what_is_no_message_is_read_by_nobody(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text.encode())


def test_nothing_but_messages_is_read() -> None:
    draw = random.Random(0)
    read = 0
    for _ in range(3000):
        line = strangers.message(draw)
        try:
            said = decode(line)
        except ValueError:  # a UnicodeDecodeError is one too
            continue
        read += 1
        assert decode(encode(said)) == said
    assert read < 100


def some(kind: Any, draw: random.Random) -> Any:
    """A value of a type, with names and places that the membership may know."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if args[0] is str:
            return draw.choice(["", "a", "b", "c", "10.0.0.1", "10.0.0.2", "paceline"])
        return draw.choice([args[1].low, 1, 2, args[1].high])
    if origin is tuple:
        parts = [args[0]] * draw.randrange(3) if args[1:] == (...,) else args
        return tuple(some(part, draw) for part in parts)
    if origin is Literal:
        return draw.choice(args)
    if kind is Problem or kind == Problem | None:
        return draw.choice([Problem("launch-nodes", "what")] + [None] * (kind is not Problem))
    if hasattr(kind, "__dataclass_fields__"):
        return kind(**{each.name: some(hints(kind)[each.name], draw) for each in fields(kind)})
    if origin in (Union, UnionType):
        return some(draw.choice(args), draw)
    return {int: 1, float: draw.random(), bool: draw.random() < 0.5, str: "why", NoneType: None}[kind]


def some_membership(draw: random.Random) -> tuple[Membership, list[int]]:
    """A launcher in some state, and the numbers of its connections."""
    rules = Rules(1, 3, max_restarts=3)
    membership = Membership(LauncherState(A, rules, draw.random() < 0.5, [B.place], 0.0, 1.0), 0.0)
    if draw.random() < 0.7:
        membership.processes_ended(Report("new"), 0.0)
    keys = [1, 2, 4]
    for key in keys[1:]:
        if draw.random() < 0.5:
            membership.on_message(key, Join(B, rules.common, 0), 0.1)
    if draw.random() < 0.5:  # it follows another one, in a round
        membership.on_message(1, messages.Joined(B, 0, is_member=False), 0.2)
        membership.on_message(1, Proposal(Round(1, 0, (B, A)), ()), 0.2)
        membership.on_message(1, messages.Commit(1, ""), 0.2)
    for tenth in range(draw.randrange(40)):
        membership.tick(0.3 + tenth / 10)
    return membership, keys


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_no_message_at_any_moment_is_a_fault_of_the_membership(count: int) -> None:
    """Five messages to each launcher, of those that have the secret, too: none raises, and all that it says can be sent."""
    draw, said = random.Random(1), 0
    for _ in range(count):
        membership, keys = some_membership(draw)
        now = 5.0
        for _ in range(5):
            kind = draw.choice(get_args(Message))
            membership.on_message(draw.choice([*keys, 99]), some(kind, draw), now)
            if draw.random() < 0.2:
                membership.on_closed(
                    draw.choice(keys), draw.choice(["closed", "refused", "silent", "secret", "stranger"]), now
                )
            if draw.random() < 0.2:
                membership.processes_ended(Report(draw.choice(["done", "failed", "preempted"])), now)
            now += draw.choice([0.1, 3.0])
            membership.tick(now)
            for action in membership.peers.actions:
                if action[0] == "send":
                    said += 1
                    assert decode(encode(action[2])) == action[2]
            membership.peers.actions.clear()
    assert said > count


def test_a_stop_has_one_of_two_modes() -> None:
    assert json.loads(encode(StopProcesses("end", "lost"))) == {"kind": "stopprocesses", "how": "end", "why": "lost"}


def test_a_launcher_that_joins_another_leader_keeps_what_it_knows() -> None:
    """That leader may itself have been left behind, and not know it yet."""
    membership = Membership(LauncherState(A, Rules(1, 3, max_restarts=3), False, [B.place], 0.0, 1.0), 0.0)
    membership.processes_ended(Report("new"), 0.0)
    for message in (messages.Joined(B, 0, is_member=False), Proposal(Round(7, 0, (B, A)), ()), messages.Commit(7, "")):
        membership.on_message(1, message, 0.2)
    membership.on_closed(1, "closed", 0.3)
    membership.on_message(3, messages.Joined(B, 2, is_member=False), 0.4)
    membership.peers.actions.clear()
    membership.on_closed(3, "closed", 0.5)
    asked = [action[2] for action in membership.peers.actions if action[0] == "send"]
    assert [message.round for message in asked if isinstance(message, Join)] == [7]
