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
from paceline_hosts.membership.state import LauncherState, LeaderLost


class Following:
    """The state of a launcher under a leader.

    Args:
        state: of this launcher.
        leader_id: the id of the leader.
        connection: the number of the connection to the leader.
        is_member: whether this launcher is a member of the current round; if not, it waits for the next one with room.
    """

    def __init__(self, state: LauncherState, leader_id: str, connection: int, is_member: bool) -> None:
        self.state = state
        self.leader_id = leader_id
        self.connection = connection
        self.is_member = is_member

    def send(self, message: Message) -> None:
        """Sends a message to the leader."""
        self.state.peers.send_over(self.connection, message)

    def on_message(self, message: Message) -> LeaderLost | None:
        """Takes in a message of the leader. Returns the loss, if this launcher has no leader any more."""
        state = self.state
        proposed = state.proposed
        if isinstance(message, Proposal):
            self._on_proposal(message)
        elif isinstance(message, Commit) and proposed is not None and message.round == proposed.number:
            state.begin_round(replace(proposed, reason=message.reason), self.leader_id)
        elif isinstance(message, StopProcesses):
            state.request_stop(message.how, message.why)
        elif isinstance(message, RunEnded):
            state.finish(message.end)
        elif isinstance(message, SwitchRun):
            return LeaderLost.to_other_run(message.place)
        elif isinstance(message, Leave):
            return LeaderLost("left", message.why, connection_ended=True)
        elif isinstance(message, Expelled):
            return LeaderLost("lost", f"{state.name_of(self.leader_id)} counted this node as lost")
        return None

    def _on_proposal(self, message: Proposal) -> None:
        """Accepts a proposal, or declines it and names the configurations that the leader must count first."""
        state = self.state
        proposed = message.round
        if state.me.id not in proposed.ids or self.leader_id not in proposed.ids:
            return
        # A leader that was unreachable for a while may not know of a round that began without it. If it counts this launcher
        # towards its quorum, it needs a quorum of that round too. An earlier proposal of the same leader is dropped.
        to_count = state.configurations
        if state.proposed_by == self.leader_id:
            to_count = to_count[:-1]
        uncounted = [ids for ids in to_count if ids not in message.configurations]
        is_counted = any(state.me.id in ids for ids in message.configurations)
        if is_counted and uncounted:
            self.send(Decline(proposed.number, tuple(uncounted)))
            return
        self.is_member = True
        for member in proposed.members:
            if member.id != self.leader_id:  # the address that reached the leader is known already
                state.known_members[member.id] = member
        state.accept(proposed, self.leader_id, message.configurations)
        # This is the last step: once all have accepted the leader begins the round, and this launcher must know of it by then.
        self.send(Accept(proposed.number))
