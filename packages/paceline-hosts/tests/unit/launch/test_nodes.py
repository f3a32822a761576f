"""Connections of launchers: what one event does to the next of the same moment, and who is turned away."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from paceline.base.errors import ConfigError
from paceline.launch.job import Job, Target
from paceline.launch.rounds import Member, Report
from paceline_hosts.membership.membership import Membership
from paceline_hosts.membership.messages import Heartbeat, Message
from paceline_hosts.membership.rules import Rules
from paceline_hosts.membership.state import LauncherState
from paceline_hosts.network import nodes
from paceline_hosts.network.addresses import main_places
from paceline_hosts.network.connection import Connection
from paceline_hosts.network.nodes import NodesByMembership
from paceline_hosts.network.ports import listen_at

SECRET = "0123456789abcdef"


class Closing(Membership):
    """Ends connection 3 as soon as anything is heard."""

    def on_message(self, key: int, message: Message, now: float) -> None:
        self.peers.actions.append(("close", 3))


def meeting(membership: Membership, listener: socket.socket | None = None) -> NodesByMembership:
    listener = listener or listen_at("127.0.0.1", 0)
    return NodesByMembership(Job(Target("script", "train.py")), listener, membership, SECRET)


def test_a_connection_that_was_ended_by_what_came_before_it_is_not_served() -> None:
    own = meeting(Closing(LauncherState(Member("a", "here", 1), Rules(1, 2), True, [], 0.0), 0.0))
    mine, theirs = socket.socketpair()
    other, far = socket.socketpair()
    own._add(Connection(2, mine, SECRET, False))
    own._connections[2].flush()
    caller = Connection(1, theirs, SECRET, True)
    caller.connecting = False
    caller.receive()
    own.poll()
    caller.send(Heartbeat(1))
    caller.receive()
    own._add(Connection(3, other, SECRET, True))
    own.poll()
    assert list(own._connections) == [2] and other.fileno() == -1
    own.leave_in_child()
    theirs.close()
    far.close()


def test_who_waits_for_the_others_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "_QUIET_S", 0.0)
    with listen_at("127.0.0.1", 0) as nobody:
        away = nobody.getsockname()
    for founds, contacts, expected in [
        (True, [], "1 of 2 nodes is here (here). The start waits for the others, 300 s at most."),
        (False, [away], f"no launcher answers at 127.0.0.1:{away[1]} yet. This one asks for 300 s at most."),
    ]:
        listener = listen_at("127.0.0.1", 0)
        me = Member("a", "here", 1, *listener.getsockname())
        rules = Rules(2, 2, join_timeout_s=300.0)
        own = meeting(
            Membership(LauncherState(me, rules, founds, contacts, time.monotonic()), time.monotonic()), listener
        )
        own.processes_ended(Report("new"))
        assert own.next(iter([False, False, False, True]).__next__) is None
        assert capsys.readouterr().err == f"paceline: {expected}\n"
        own.leave_in_child()


@pytest.fixture
def leader() -> Iterator[NodesByMembership]:
    listener = listen_at("127.0.0.1", 0)
    me = Member("a", "here", 1, *listener.getsockname())
    own = meeting(Membership(LauncherState(me, Rules(1, 2), True, [], time.monotonic()), time.monotonic()), listener)
    yield own
    own.leave_in_child()
    own._connections.clear()


def test_strangers_have_little_room_and_little_time(
    leader: NodesByMembership, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = leader.membership.state.me.place
    links = [socket.create_connection(place) for _ in range(nodes._MAX_HANDSHAKES + 5)]
    for _ in range(2 * len(links)):
        leader.poll()
    assert len(leader._connections) == nodes._MAX_HANDSHAKES
    monkeypatch.setattr(nodes, "_HANDSHAKE_TIMEOUT_S", -1.0)
    leader._last_tick = 0.0
    leader.poll()
    assert not leader._connections
    for link in links:
        link.close()
    assert len(capsys.readouterr().err.splitlines()) == 2  # at 1 and at 10


def test_a_runs_name_fits_in_a_message() -> None:
    with pytest.raises(ConfigError, match="has 300 characters"):
        nodes.rules_of(Job(Target("script", "train.py"), nodes=2, options={"run_id": "x" * 300}))


def test_a_host_of_the_longest_name_is_told_apart() -> None:
    longest = "n" * 64  # Linux allows it for a host; a label of a DNS name has at most 63
    assert main_places(Job(Target("script", "train.py"), main_address=f"{longest},127.0.0.1")) == [("127.0.0.1", 0)]


def test_an_ipv6_address_with_a_port_stands_in_brackets() -> None:
    job = Job(Target("script", "train.py"), main_address="[::1]:4000,::1", main_port=29500)
    assert main_places(job) == [("::1", 4000), ("::1", 29500)]
