"""Connections of launchers: what one event does to the next of the same moment."""

from __future__ import annotations

import socket
from typing import Any

from paceline.launch.launcher import Job, Target
from paceline.launch.membership import Membership
from paceline.launch.nodes import Connection, Nodes
from paceline.launch.rounds import Member, Rules


class Closing(Membership):
    """Ends connection 3 as soon as anything is heard."""

    def heard(self, key: int, message: dict[str, Any], now: float) -> None:
        self.actions.append(("close", 3))


def test_a_connection_that_was_ended_by_what_came_before_it_is_not_served() -> None:
    machine = Closing(Member("a", "here", 1), Rules(1, 2), True, [], 0.0)
    nodes = Nodes(Job(Target("script", "train.py")), None, machine)
    mine, theirs = socket.socketpair()
    other, far = socket.socketpair()
    nodes._add(Connection(2, mine, False))
    theirs.send(b"{}\n")
    nodes._add(Connection(3, other, True))
    nodes.tend()
    assert list(nodes._connections) == [2] and other.fileno() == -1
    nodes.leave_in_child()
    theirs.close()
    far.close()
