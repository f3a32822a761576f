"""What a launcher does while another one leads: it says how its processes end, and does what the leader has decided.

    leader   -- Proposal -->       this launcher   who takes part in the next round
             <-- Accept, Decline --
             -- Commit -->                         all have accepted: the round begins
             -- StopProcesses -->                  its processes are to end
             <-- ProcessesEnded --                 they have

A launcher that leads has a `Leadership` in its place (`leadership.py`); one that seeks a run has neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.launch.membership.messages import (
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
    from paceline.launch.membership.membership import Membership


class Following:
    """One launcher's part under a leader.

    Args:
        membership: of this launcher.
        leader_id: who leads.
        connection: number of the connection to the leader.
        is_member: whether this launcher takes part in the leader's rounds; else it waits for a place.
    """

    def __init__(self, membership: Membership, leader_id: str, connection: int, is_member: bool) -> None:
        self.membership = membership
        self.leader_id = leader_id
        self.connection = connection
        self.is_member = is_member

    def send(self, message: Message) -> None:
        """Says something to the leader."""
        self.membership.peers.send_over(self.connection, message)

    def on_message(self, message: Message, now: float) -> None:
        """What the leader says."""
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
            why = f"{membership.name_of(self.leader_id)} took this node for lost"
            membership.lose_leader("lost", why, now)

    def _on_proposal(self, message: Proposal) -> None:
        """Accepts a round, or says what its leader must count before."""
        membership = self.membership
        proposed = message.round
        if membership.me.id not in proposed.ids or self.leader_id not in proposed.ids:
            return
        # A leader that was away may not know of a round that was begun without it. Where it counts this launcher towards
        # its quorum, it needs a quorum of that round too. What the same leader has proposed before is given up.
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
            if member.id != self.leader_id:  # its address is known by what reached it
                membership.known_members[member.id] = member
        membership.configurations = [*message.configurations, proposed.ids]
        # Last: the leader begins the round when all have accepted, and from then on this launcher must know of it.
        self.send(Accept(proposed.number))
