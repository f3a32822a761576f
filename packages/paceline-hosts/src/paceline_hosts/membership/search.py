"""What a launcher without a leader does: it looks for a run, founds one, or leads what is left of its last round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.launch.rounds import End, Place
from paceline_hosts.membership.messages import Heartbeat, HeartbeatAck, Join, Message, NoLeader, Redirect, Refused
from paceline_hosts.membership.peers import NEVER, SETTLE_S, Request
from paceline_hosts.membership.rules import LossKind, newest_members_first

if TYPE_CHECKING:
    from paceline_hosts.membership.membership import Membership

_ASK_AGAIN_S = 0.5
_MAX_MEMBERS_ASKED = 16
# Answers that mean: no launcher of this run is there. A launcher without the secret counts as none.
_NO_LAUNCHER = ("refused", "silent", "stranger", "secret", "tls")


class Search:
    """The search for a run.

    Args:
        membership: the state of this launcher.
        is_founder: whether this launcher begins a run if it finds none.
        contacts: the places to ask for a run.
        now: the time in seconds.

    Attributes:
        is_founder, contacts: as given, and changed by what was learned since.
        answers: by place: "no leader", "redirect", or how the connection ended (`Membership.on_closed`).
        highest_round: the highest number of a round that any launcher has reported.
        lost: whether the last leader was lost or has left, and why.
        since: when the last leader was lost.
    """

    def __init__(self, membership: Membership, is_founder: bool, contacts: Sequence[Place], now: float) -> None:
        self.membership = membership
        self.peers = membership.peers
        self.is_founder = is_founder
        self.contacts = [place for place in contacts if place != membership.me.place]
        self.answers: dict[Place, str] = {}
        self.highest_round = 0
        self.lost: tuple[LossKind, str] = ("lost", "")
        self.since = now
        self._candidate_since: float | None = None
        self._last_asked = NEVER

    def begin(self, how: LossKind, why: str, now: float) -> None:
        """Begins a new search, after the leader was lost or has left."""
        self.lost = (how, why)
        self.since = now
        self.answers.clear()
        self._candidate_since = None
        self._last_asked = NEVER

    def begin_at(self, place: Place) -> None:
        """Looks for another run, which goes on at a place: this launcher asks there first."""
        self.highest_round = 0
        self.is_founder = False
        if place in self.contacts:
            self.contacts.remove(place)
        self.contacts.insert(0, place)

    def step(self, now: float) -> list[str]:
        """Sends the questions that are due. Returns the members that this launcher now leads; [] if it does not lead."""
        membership = self.membership
        if now - self._last_asked >= _ASK_AGAIN_S and not membership.leaving:
            self._last_asked = now
            asked = self.peers.places_asked(Join)
            question = Join(membership.me, membership.rules.common, membership.latest_number)
            for place, member_id in self._places_to_ask().items():
                if place not in asked:
                    self.peers.ask(place, member_id, question, now)
        if membership.configurations:
            return self._members_to_lead(now)
        is_ready = membership.report is not None
        if is_ready and self.is_founder and self.is_nowhere():
            return [membership.me.id]
        return []

    def is_nowhere(self) -> bool:
        """Returns whether there is no run at any place: each has said so, or has not answered."""
        return all(self.answers.get(place, "redirect") != "redirect" for place in self.contacts)

    def _members_to_lead(self, now: float) -> list[str]:
        """Returns the members that this launcher may lead now, in the order of the last rounds; [] if it may not lead."""
        membership = self.membership
        if not self._is_candidate():
            self._candidate_since = None
            return []
        if self._candidate_since is None:
            self._candidate_since = now
        here = {membership.me.id, *self.peers.connection_of}
        missing = set(membership.configurations[-1]) - here - membership.dead
        # The other members search at the same time, and may be here a moment later. A round that begins without them would
        # have to end again when they join.
        waited = now - self._candidate_since >= SETTLE_S
        if (missing and not waited) or not membership.has_quorum(here, membership.configurations, now):
            return []
        return [member_id for member_id in newest_members_first(membership.configurations) if member_id in here]

    def _places_to_ask(self) -> dict[Place, str]:
        """The places to ask: the contacts, and the members of the last rounds, with the id of the member at each place."""
        membership = self.membership
        places = dict.fromkeys(self.contacts, "")
        living = []
        for member_id in newest_members_first(membership.configurations):
            is_other = member_id != membership.me.id and member_id in membership.known_members
            if is_other and member_id not in membership.dead:
                living.append(member_id)
        for member_id in living[:_MAX_MEMBERS_ASKED]:
            places[membership.known_members[member_id].place] = member_id
        return places

    def _is_candidate(self) -> bool:
        """Returns whether no member before this one can lead, and no launcher knows of a later round."""
        membership = self.membership
        if self.highest_round > membership.latest_number:
            return False
        order = membership.configurations[-1]
        before_me = order[: order.index(membership.me.id)]
        living = [member_id for member_id in before_me if member_id not in membership.dead]
        places = [membership.known_members[member_id].place for member_id in living]
        return all(self.answers.get(place) in _NO_LAUNCHER for place in places)

    def on_answer(self, key: int, request: Request, message: Message, now: float) -> None:
        """Takes in an answer to `Join` other than `Joined`."""
        if isinstance(message, NoLeader):
            # A launcher that was in a round counts as a redirect, because its run may go on.
            self.answers[request.place] = "redirect" if message.round else "no leader"
            self.highest_round = max(self.highest_round, message.round)
            request.answered = True
            request.last_heard_at = now
            return
        if isinstance(message, Heartbeat | HeartbeatAck):
            request.last_heard_at = now
            return
        self.peers.end_request(key)
        if isinstance(message, Refused):
            self.membership.end = End(1, error=message.problem)
        elif isinstance(message, Redirect):
            self.answers[request.place] = "redirect"
            if message.place != self.membership.me.place and message.place not in self._places_to_ask():
                self.contacts.append(message.place)
                self._last_asked = NEVER
        else:  # `Expelled`: that launcher has lost its own leader
            self.answers.pop(request.place, None)

    def on_no_answer(self, place: Place, how: str) -> None:
        """Takes in that a place has not answered; `how` as in `Membership.on_closed`."""
        if how == "closed":  # a launcher was there a moment ago, so it is asked again
            self.answers.pop(place, None)
        else:
            self.answers[place] = how
