"""What a launcher does while another one leads: it carries out what the leader decides, and reports how its processes end.

    leader   -- Proposal -->         follower   the members of the next round
             <-- Accept, Decline --
             -- Commit -->                      all members have accepted: the round begins
             -- StopProcesses -->               the processes must end
             <-- ProcessesEnded --              they have ended

A launcher that leads has a `Leadership` in its place (`leadership.py`); one that seeks a run has neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_hosts.membership.messages import (
    Accept,
    Commit,
    Decline,
    Expelled,
    Leave,
    Message,
    Proposal,
    RunEnded,
    StopProcesses,
    SwitchRun,
)

if TYPE_CHECKING:
    from paceline_hosts.membership.membership import Membership


class Following:
    """The state of a launcher under a leader.

    Args:
        membership: the state of this launcher.
        leader_id: the id of the leader.
        connection: the number of the connection to the leader.
        is_member: whether this launcher is a member of the current round; if not, it waits for the next one with room.
    """

    def __init__(self, membership: Membership, leader_id: str, connection: int, is_member: bool) -> None:
        self.membership = membership
        self.leader_id = leader_id
        self.connection = connection
        self.is_member = is_member

    def send(self, message: Message) -> None:
        """Sends a message to the leader."""
        self.membership.peers.send_over(self.connection, message)

    def on_message(self, message: Message, now: float) -> None:
        """Takes in a message of the leader."""
        membership = self.membership
        proposed = membership.proposed
        if isinstance(message, Proposal):
            self._on_proposal(message)
        elif isinstance(message, Commit) and proposed is not None and message.round == proposed.number:
            membership.begin_round(replace(proposed, reason=message.reason))
        elif isinstance(message, StopProcesses):
            membership.request_stop(message.how, message.why)
        elif isinstance(message, RunEnded):
            membership.end = message.end
        elif isinstance(message, SwitchRun):
            membership.switch_run(message.place, now)
        elif isinstance(message, Leave):
            membership.lose_leader("left", message.why, now, connection_ended=True)
        elif isinstance(message, Expelled):
            why = f"{membership.name_of(self.leader_id)} counted this node as lost"
            membership.lose_leader("lost", why, now)

    def _on_proposal(self, message: Proposal) -> None:
        """Accepts a proposal, or declines it and names the configurations that the leader must count first."""
        membership = self.membership
        proposed = message.round
        if membership.me.id not in proposed.ids or self.leader_id not in proposed.ids:
            return
        # A leader that was unreachable for a while may not know of a round that began without it. If it counts this launcher
        # towards its quorum, it needs a quorum of that round too. An earlier proposal of the same leader is dropped.
        to_count = membership.configurations
        if membership.proposed_by == self.leader_id:
            to_count = to_count[:-1]
        uncounted = [ids for ids in to_count if ids not in message.configurations]
        is_counted = any(membership.me.id in ids for ids in message.configurations)
        if is_counted and uncounted:
            self.send(Decline(proposed.number, tuple(uncounted)))
            return
        membership.proposed = proposed
        membership.proposed_by = self.leader_id
        self.is_member = True
        for member in proposed.members:
            if member.id != self.leader_id:  # the address that reached the leader is known already
                membership.known_members[member.id] = member
        membership.configurations = [*message.configurations, proposed.ids]
        # This is the last step: once all have accepted the leader begins the round, and this launcher must know of it by then.
        self.send(Accept(proposed.number))
