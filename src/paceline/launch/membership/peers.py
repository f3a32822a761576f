"""The connections of one launcher to others: heartbeats over them, and the questions that it asks over new ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.launch.membership.messages import Announce, Heartbeat, HeartbeatAck, Join, Message, Probe
from paceline.launch.membership.rounds import Place, Rules

NEVER = float("-inf")
ANSWER_S = 1.0  # a launcher that is there answers within this
SETTLE_S = 2.0  # a new leader waits this long for others that were members
# Others need at least so long to begin a round without a launcher: they ask it in vain, and then wait for it.
_UNREPLACED_S = ANSWER_S + SETTLE_S
# However rare `heartbeat_s` wants them: a proof of death rests on a heartbeat that was answered within `_UNREPLACED_S`.
_HEARTBEAT_AT_MOST_S = 1.0
_HEARTBEATS_REMEMBERED = 10


@dataclass
class Request:
    """A question on its way.

    Attributes:
        place: whom it goes to.
        member_id: the member that was there; "" where none is known.
        question: what is asked.
        last_heard_at: when it was sent, or something came back.
        answered: whether something came back: then the connection stays open, until there is a leader.
    """

    place: Place
    member_id: str
    question: Join | Probe | Announce
    last_heard_at: float
    answered: bool = False


class Peers:
    """The connections, by their numbers and by the members at their other ends.

    Args:
        rules: how patient the launchers are.
        now: seconds of a clock that only goes forward.

    Attributes:
        actions: for the network, in order: ("open", key, place), ("send", key, message), ("close", key).
        connection_of: by member, the connection that it opened to us.
        member_of: by connection, the member at its other end; that to the leader included.
        last_heard_at: by member.
        acknowledged_at: by member, when the last heartbeat was sent that it has answered.
        requests: by connection.
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
        """Sends heartbeats when they are due; returns the questions that were not answered in time."""
        # Where this process itself was stopped for a while, it heard nobody, and nobody else is to blame.
        if now - self._last_tick > self.rules.silence_limit_s / 2:
            self.last_heard_at = dict.fromkeys(self.last_heard_at, now)
            for request in self.requests.values():
                request.last_heard_at = now
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
        """A member has opened a connection to us."""
        self.disconnect(member_id)
        self.connection_of[member_id] = key
        self.follow(key, member_id, now)

    def follow(self, key: int, member_id: str, now: float) -> None:
        """A connection leads to a member from now on."""
        self.member_of[key] = member_id
        self.last_heard_at[member_id] = now

    def send(self, member_id: str, message: Message) -> None:
        """Sends to a member that has a connection to us."""
        if member_id in self.connection_of:
            self.send_over(self.connection_of[member_id], message)

    def send_over(self, key: int, message: Message) -> None:
        """Sends over a connection."""
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
        """Sends one over each connection that is to stay open."""
        self._last_heartbeat = now
        self._heartbeat += 1
        self._heartbeat_sent_at[self._heartbeat] = now
        self._heartbeat_sent_at.pop(self._heartbeat - _HEARTBEATS_REMEMBERED, None)
        waiting_with = [key for key, request in self.requests.items() if request.answered]
        for key in (*self.member_of, *waiting_with):
            self.send_over(key, Heartbeat(self._heartbeat))

    def on_heartbeat(self, key: int, message: Heartbeat | HeartbeatAck) -> None:
        """A heartbeat is answered at once; an answer says how lately the member has heard of us."""
        if isinstance(message, Heartbeat):
            self.send_over(key, HeartbeatAck(message.number))
            return
        # A number that is no longer remembered is an answer that comes too late to prove anything.
        sent_at = self._heartbeat_sent_at.get(message.number)
        if sent_at is not None:
            self.acknowledged_at[self.member_of[key]] = sent_at

    def death_proof_until(self, member_id: str) -> float:
        """Until when a refused call at a member's place proves that it died as one of us.

        Later it may have lost us, gone on with others and died after that, and these others go on still. What counts is a
        heartbeat of ours that it has answered: a connection that ends may have ended long ago, where the link was cut or this
        launcher was stopped for a while.
        """
        return self.acknowledged_at.get(member_id, NEVER) + min(_UNREPLACED_S, self.rules.silence_limit_s)

    # Questions

    def ask(self, place: Place, member_id: str, question: Join | Probe | Announce, now: float) -> None:
        """Asks a place something over a new connection."""
        key = self._next_key
        self._next_key += 2  # the even numbers are of connections that others open
        self.requests[key] = Request(place, member_id, question, now)
        self.actions.append(("open", key, place))
        self.send_over(key, question)

    def end_request(self, key: int) -> None:
        """A question needs no connection any more."""
        del self.requests[key]
        self.close(key)

    def end_requests(self) -> None:
        """No question does."""
        for key in list(self.requests):
            self.end_request(key)

    def places_asked(self, kind: type) -> set[Place]:
        """Places that have not answered a question of a kind yet."""
        return {request.place for request in self.requests.values() if isinstance(request.question, kind)}

    def last_asked_at(self, member_id: str) -> float:
        """When a member was last asked something that it has not answered yet."""
        asked_at = [request.last_heard_at for request in self.requests.values() if request.member_id == member_id]
        return max(asked_at, default=NEVER)
