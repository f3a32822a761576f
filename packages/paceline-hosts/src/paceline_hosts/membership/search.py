"""What a launcher without a leader does: it looks for a run, founds one, or leads what is left of its last round."""

from __future__ import annotations

from paceline.launch.rounds import End, Place
from paceline_hosts.membership import errors
from paceline_hosts.membership.messages import Heartbeat, HeartbeatAck, Join, Message, NoLeader, Redirect, Refused
from paceline_hosts.membership.peers import NEVER, SETTLE_S, Request
from paceline_hosts.membership.rules import LossKind, newest_members_first
from paceline_hosts.membership.state import LauncherState

_ASK_AGAIN_S = 0.5
_MAX_MEMBERS_ASKED = 16
# A launcher with another secret, or another `--tls`, keeps asking for this long before it gives up.
_MISMATCH_TIMEOUT_S = 2.0
# Answers that mean: no launcher of this run is there. A launcher without the secret counts as none.
_NO_LAUNCHER = ("refused", "silent", "stranger", "secret", "tls")


class Search:
    """The search for a run.

    Args:
        state: of this launcher.
        now: the time in seconds.

    Attributes:
        answers: by place: "no leader", "redirect", or how the connection ended (`Membership.on_closed`).
        lost: whether the last leader was lost or has left, and why.
        since: when the last leader was lost.
    """

    def __init__(self, state: LauncherState, now: float) -> None:
        self.state = state
        self.peers = state.peers
        self.answers: dict[Place, str] = {}
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

    def step(self, now: float) -> list[str]:
        """Sends the questions that are due. Returns the members that this launcher now leads; [] if it does not lead."""
        state = self.state
        if now - self._last_asked >= _ASK_AGAIN_S and not state.leaving:
            self._last_asked = now
            asked = self.peers.places_asked(Join)
            question = Join(state.me, state.rules.common, state.latest_number)
            for place, member_id in self._places_to_ask().items():
                if place not in asked:
                    self.peers.ask(place, member_id, question, now)
        if state.configurations:
            return self._members_to_lead(now)
        is_ready = state.report is not None
        if is_ready and state.is_founder and self.is_nowhere():
            return [state.me.id]
        return []

    def end(self, now: float) -> End | None:
        """How this launcher ends, once searching longer cannot help; None while it may help."""
        state = self.state
        rules = state.rules
        waited_s = now - self.since
        if state.configurations:
            last = state.round
            # If the loss is one failure more than `max_restarts`, there is nothing to wait for.
            over = rules.fixed and last is not None and last.restarts >= rules.max_restarts
            limit_s = rules.silence_limit_s if over else rules.join_timeout_s
            return self._cut_off() if waited_s > limit_s else None
        problem = errors.mismatch(self.answers)
        if problem is not None and waited_s > _MISMATCH_TIMEOUT_S:
            return End(1, error=problem)
        if waited_s > rules.join_timeout_s:
            return End(1, error=errors.unanswered(rules.join_timeout_s, self.answers))
        return None

    def _cut_off(self) -> End:
        """Returns the end of a part of a run that may not go on."""
        state = self.state
        members = set(state.configurations[-1])
        here = members & {state.me.id, *self.peers.connection_of}
        store = ""
        # The store has a vote only where exactly half of the nodes are left.
        if state.witness is not None and 2 * len(here) == len(members):
            store = state.witness.why_not or f"{state.witness.name} gave its vote to the others"
        why = self.lost[1]
        return End(1, why, error=errors.cut_off(why, len(here), len(members), store))

    def is_nowhere(self) -> bool:
        """Returns whether there is no run at any place: each has said so, or has not answered."""
        return all(self.answers.get(place, "redirect") != "redirect" for place in self.state.contacts)

    def _members_to_lead(self, now: float) -> list[str]:
        """Returns the members that this launcher may lead now, in the order of the last rounds; [] if it may not lead."""
        state = self.state
        if not self._is_candidate():
            self._candidate_since = None
            return []
        if self._candidate_since is None:
            self._candidate_since = now
        here = {state.me.id, *self.peers.connection_of}
        missing = set(state.configurations[-1]) - here - state.dead
        # The other members search at the same time, and may be here a moment later. A round that begins without them would
        # have to end again when they join.
        waited = now - self._candidate_since >= SETTLE_S
        if (missing and not waited) or not state.has_quorum(here, state.configurations, now):
            return []
        return [member_id for member_id in newest_members_first(state.configurations) if member_id in here]

    def _places_to_ask(self) -> dict[Place, str]:
        """The places to ask: the contacts, and the members of the last rounds, with the id of the member at each place."""
        state = self.state
        places = dict.fromkeys(state.contacts, "")
        living = []
        for member_id in newest_members_first(state.configurations):
            is_other = member_id != state.me.id and member_id in state.known_members
            if is_other and member_id not in state.dead:
                living.append(member_id)
        for member_id in living[:_MAX_MEMBERS_ASKED]:
            places[state.known_members[member_id].place] = member_id
        return places

    def _is_candidate(self) -> bool:
        """Returns whether no member before this one can lead, and no launcher knows of a later round."""
        state = self.state
        if state.highest_round > state.latest_number:
            return False
        order = state.configurations[-1]
        before_me = order[: order.index(state.me.id)]
        living = [member_id for member_id in before_me if member_id not in state.dead]
        places = [state.known_members[member_id].place for member_id in living]
        return all(self.answers.get(place) in _NO_LAUNCHER for place in places)

    def on_answer(self, key: int, request: Request, message: Message, now: float) -> None:
        """Takes in an answer to `Join` other than `Joined`."""
        if isinstance(message, NoLeader):
            # A launcher that was in a round counts as a redirect, because its run may go on.
            self.answers[request.place] = "redirect" if message.round else "no leader"
            self.state.hear_of_round(message.round)
            request.heard(now, answered=True)
            return
        if isinstance(message, Heartbeat | HeartbeatAck):
            request.heard(now, answered=False)
            return
        self.peers.end_request(key)
        if isinstance(message, Refused):
            self.state.finish(End(1, error=message.problem))
        elif isinstance(message, Redirect):
            self.answers[request.place] = "redirect"
            if message.place != self.state.me.place and message.place not in self._places_to_ask():
                self.state.contacts.append(message.place)
                self._last_asked = NEVER
        else:  # `Expelled`: that launcher has lost its own leader
            self.answers.pop(request.place, None)

    def on_no_answer(self, place: Place, how: str) -> None:
        """Takes in that a place has not answered; `how` as in `Membership.on_closed`."""
        if how == "closed":  # a launcher was there a moment ago, so it is asked again
            self.answers.pop(place, None)
        else:
            self.answers[place] = how
