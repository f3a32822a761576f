"""The connections of one launcher to others: heartbeats over them, and the questions that it asks over new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.launch.rounds import Place
from paceline_hosts.membership.messages import Announce, Heartbeat, HeartbeatAck, Join, Message, Probe
from paceline_hosts.membership.rules import Rules

NEVER = float("-inf")
ANSWER_S = 1.0  # a launcher that is alive answers a question within this time
SETTLE_S = 2.0  # a new leader waits this long for other members of the last round
# Other launchers need at least this long to begin a round without a launcher: they ask it, and then wait for it.
_UNREPLACED_S = ANSWER_S + SETTLE_S
# An upper limit for `heartbeat_s`: a proof of death needs a heartbeat that was answered within `_UNREPLACED_S`.
_HEARTBEAT_AT_MOST_S = 1.0
_HEARTBEATS_REMEMBERED = 10


@dataclass
class Request:
    """A question that was sent.

    Attributes:
        place: where it was sent to.
        member_id: the member that was at that place; "" for none that is known.
        question: the message.
        last_heard_at: when it was sent, or something was received.
        answered: whether an answer was received. The connection then stays open until there is a leader.
    """

    place: Place
    member_id: str
    question: Join | Probe | Announce
    last_heard_at: float
    answered: bool = False

    def heard(self, now: float, *, answered: bool) -> None:
        """Notes that something was received: the answer, or a sign of life."""
        self.last_heard_at = now
        self.answered = self.answered or answered


class Peers:
    """The connections of a launcher, by their numbers and by the members at their other ends.

    Args:
        rules: the timeouts.
        now: the time in seconds of a monotonic clock.

    Attributes:
        actions: what the network must do, in order: ("open", key, place), ("send", key, message), ("close", key).
        connection_of: the connection that each member opened to this launcher.
        member_of: the member at the other end of each connection, including the one to the leader.
        last_heard_at: when something was last received from each member.
        acknowledged_at: for each member, when the last heartbeat that it has answered was sent.
        requests: the open questions, by connection.
    """

    def __init__(self, rules: Rules, now: float) -> None:
        self.rules = rules
        self.actions: list[tuple[Any, ...]] = []
        self.connection_of: dict[str, int] = {}
        self.member_of: dict[int, str] = {}
        self.last_heard_at: dict[str, float] = {}
        self.acknowledged_at: dict[str, float] = {}
        self.requests: dict[int, Request] = {}
        self._next_key = 1
        self._last_tick = now
        self._last_heartbeat = NEVER
        self._heartbeat = 0
        self._heartbeat_sent_at: dict[int, float] = {}  # by number

    def tick(self, now: float) -> list[Request]:
        """Sends heartbeats that are due. Returns the questions that were not answered in time."""
        # If this process itself was stopped for a while, it has received nothing, and the others are not silent.
        if now - self._last_tick > self.rules.silence_limit_s / 2:
            self.last_heard_at = dict.fromkeys(self.last_heard_at, now)
            for request in self.requests.values():
                request.heard(now, answered=False)
        self._last_tick = now
        if now - self._last_heartbeat >= min(self.rules.heartbeat_s, _HEARTBEAT_AT_MOST_S):
            self.send_heartbeats(now)
        unanswered = []
        for key, request in list(self.requests.items()):
            limit_s = self.rules.silence_limit_s if request.answered else ANSWER_S
            if now - request.last_heard_at > limit_s:
                self.end_request(key)
                unanswered.append(request)
        return unanswered

    def accept(self, key: int, member_id: str, now: float) -> None:
        """Takes in a connection that a member has opened."""
        self.disconnect(member_id)
        self.connection_of[member_id] = key
        self.follow(key, member_id, now)

    def follow(self, key: int, member_id: str, now: float) -> None:
        """Notes that a connection leads to a member."""
        self.member_of[key] = member_id
        self.last_heard_at[member_id] = now

    def send(self, member_id: str, message: Message) -> None:
        """Sends a message to a member that has opened a connection."""
        if member_id in self.connection_of:
            self.send_over(self.connection_of[member_id], message)

    def send_over(self, key: int, message: Message) -> None:
        """Sends a message over a connection."""
        self.actions.append(("send", key, message))

    def close(self, key: int) -> None:
        """Ends a connection."""
        self.member_of.pop(key, None)
        self.actions.append(("close", key))

    def disconnect(self, member_id: str, last_word: Message | None = None) -> None:
        """Ends the connection of a member."""
        key = self.connection_of.pop(member_id, None)
        if key is not None:
            if last_word is not None:
                self.send_over(key, last_word)
            self.close(key)

    # Heartbeats

    def send_heartbeats(self, now: float) -> None:
        """Sends a heartbeat over each connection that must stay open."""
        self._last_heartbeat = now
        self._heartbeat += 1
        self._heartbeat_sent_at[self._heartbeat] = now
        self._heartbeat_sent_at.pop(self._heartbeat - _HEARTBEATS_REMEMBERED, None)
        # A launcher that has no leader either keeps its connection to this one, until one of the two leads.
        waiting_with = [key for key, request in self.requests.items() if request.answered]
        for key in (*self.member_of, *waiting_with):
            self.send_over(key, Heartbeat(self._heartbeat))

    def on_heartbeat(self, key: int, message: Heartbeat | HeartbeatAck) -> None:
        """Answers a heartbeat; an answer shows when the member has last received one."""
        if isinstance(message, Heartbeat):
            self.send_over(key, HeartbeatAck(message.number))
            return
        # If the number was dropped from the table, the answer is too late to prove anything.
        sent_at = self._heartbeat_sent_at.get(message.number)
        if sent_at is not None:
            self.acknowledged_at[self.member_of[key]] = sent_at

    def death_proof_until(self, member_id: str) -> float:
        """Until this time, a refused connection at the place of a member proves that it died as a member of this group.

        Later the member may have lost its connection to this launcher, gone on with others and then died, while the others
        still go on. The time counts from the last heartbeat that it has answered, and not from the end of the connection: that
        may be noticed late, if the network was cut or this launcher was stopped for a while.
        """
        return self.acknowledged_at.get(member_id, NEVER) + min(_UNREPLACED_S, self.rules.silence_limit_s)

    # Questions

    def ask(self, place: Place, member_id: str, question: Join | Probe | Announce, now: float) -> None:
        """Asks a question at a place, over a new connection."""
        key = self._next_key
        self._next_key += 2  # connections that others open have even numbers
        self.requests[key] = Request(place, member_id, question, now)
        self.actions.append(("open", key, place))
        self.send_over(key, question)

    def end_request(self, key: int) -> None:
        """Drops a question, and closes its connection."""
        del self.requests[key]
        self.close(key)

    def end_requests(self) -> None:
        """Drops all questions."""
        for key in list(self.requests):
            self.end_request(key)

    def places_asked(self, kind: type) -> set[Place]:
        """Returns the places with an open question of a kind."""
        return {request.place for request in self.requests.values() if isinstance(request.question, kind)}

    def members_asked_at(self) -> dict[str, float]:
        """Returns when the last open question to each member was sent; a later question is a later entry."""
        return {request.member_id: request.last_heard_at for request in self.requests.values()}
