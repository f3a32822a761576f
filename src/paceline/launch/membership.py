"""Who takes part: a launcher's view of all launchers, as a machine without sockets or clocks.

    seek    asks every place it knows for a run to join; the first place that is this host's founds one
    follow  has joined: signs of life to the leader and back; starts and ends its processes as the leader says
    lead    decides (`leading.py`): one leader, the first member in the order of joining, and one decision a failure

    follow -- leader closed its end, or is silent for limit_s --> seek: whoever was before me is dead or silent, and
                                                                  enough of us are here (`may_go_on`)  --> lead

What comes in: `heard`, `closed`, `tick` from the network, `rest` and `leave` from this launcher's own processes and
signals. What goes out: `actions` for the network; `begin`, `halt` and `end` for the processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.launch import objections
from paceline.launch.leading import Lead
from paceline.launch.messages import (
    Bye,
    Expelled,
    Go,
    Halt,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Here,
    Home,
    How,
    Joined,
    Later,
    Leaving,
    Message,
    Move,
    Over,
    Probe,
    Proposal,
    Ready,
    Refused,
    Rest,
    Wait,
)  # fmt: skip
from paceline.launch.rounds import End, Member, Place, Report, Round, Rules, called, may_go_on

_ASK_AGAIN_S = 0.5
_ANSWER_S = 1.0  # a launcher that is there answers within this
_SETTLE_S = 2.0  # a new leader waits this long for others that were members
# Sooner nobody can begin a round without a launcher that answered them: they ask it in vain, and wait for it.
_UNREPLACED_S = _ANSWER_S + _SETTLE_S
_MOST_BETWEEN_HEARTBEATS_S = (
    1.0  # whatever `beat_s` is: proofs of death rest on heartbeats answered within `_UNREPLACED_S`
)
_HEARTBEATS_REMEMBERED = 10
_ASKED_AT_ONCE = 16
_SECRET_S = 2.0  # a launcher whose secret differs asks for this long before it gives up
# Places where no launcher of this run has answered. Who cannot prove the secret counts no more than silence does.
_NO_LAUNCHER = ("refused", "silent", "stranger", "secret")


@dataclass
class Ask:
    """A question on its way: to a place, about a member, for a purpose ("hello", "probe" or "home")."""

    place: Place
    who: str
    purpose: str
    since: float
    answered: bool = False


class Membership:
    """One launcher's part.

    Args:
        me: this launcher.
        rules: what it was told.
        founds: whether it begins a run where it finds none.
        contacts: where to ask for a run.
        now: seconds of a clock that only goes forward; so everywhere here.
        wall: the time of day (seconds since the epoch).

    Attributes:
        actions: for the network, in order: ("open", key, place), ("send", key, message), ("close", key).
        begin: a round whose processes are to be started; the launcher sets it to None as it does so.
        halt: how ("save" or "end") and why the processes are to be ended; None where they may run.
        end: set once this launcher is to end.
        notes: lines for the user.
    """

    def __init__(
        self, me: Member, rules: Rules, founds: bool, contacts: Sequence[Place], now: float, wall: float = 0.0
    ) -> None:
        self.me, self.rules, self.founds = me, rules, founds
        self.contacts = [place for place in contacts if place != me.place]
        self.born = wall
        self._wall_of_zero = wall - now
        self.actions: list[tuple[Any, ...]] = []
        self.notes: list[str] = []
        self.begin: Round | None = None
        self.halt: tuple[str, str] | None = None
        self.end: End | None = None
        self.report: Report | None = None  # None until the launcher has said that it is ready, and while processes run
        self.round: Round | None = None  # the last one that was begun
        self.proposed: Round | None = None
        self.views: list[tuple[str, ...]] = []  # sets of members of which enough must go on together
        self.dead: set[str] = set()
        self.newest = 0  # the last decision that anybody knows of
        self.known: dict[str, Member] = {me.id: me}
        self.links: dict[str, int] = {}  # by member: the connection that it opened to us
        self.whose: dict[int, str] = {}
        self.heard_at: dict[str, float] = {}
        self.asks: dict[int, Ask] = {}
        self.answers: dict[Place, str] = {}  # while seeking: "wait", "later", or how `closed` says that it ended
        self.leader = self.leaving = ""
        self.leader_key = -1
        self.lead: Lead | None = None
        self.lost = ("lost", "")  # how and why the leader went
        self.since = now
        self.trusted_until = -1e9  # until then a refused call proves that a launcher is dead
        self.confirmed_at: dict[str, float] = {}  # by member: when the last heartbeat was sent that it has answered
        self.candidate_since: float | None = None
        self._next_key = 1
        self._ticked = now
        self._beaten = self._asked = -1e9
        self._heartbeat = 0
        self._heartbeats: dict[int, float] = {}  # by number: when it was sent

    # What comes in

    def heard(self, key: int, message: Message, now: float) -> None:
        """A message over a connection."""
        if key in self.asks:
            self._answer(key, message, now)
        elif key in self.whose:
            who = self.whose[key]
            self.heard_at[who] = now
            if isinstance(message, Heartbeat):
                self._say(key, HeartbeatAck(message.number))
            elif isinstance(message, HeartbeatAck):
                self.confirmed_at[who] = self._heartbeats.get(message.number, self.confirmed_at.get(who, -1e9))
            elif self.lead is not None:
                self.lead.heard(who, message, now)
            elif who == self.leader:
                self._obey(message, now)
        elif isinstance(message, Hello):
            self._greet(key, message, now)
        elif isinstance(message, Probe):
            self._say(key, self._here())
        elif isinstance(message, Home):
            self._called_home(key, message, now)
        self._step(now)

    def closed(self, key: int, how: str, now: float) -> None:
        """A connection has ended: "refused", "silent" (never came to be), "closed", "secret" or "stranger" (`Unproved`)."""
        ask = self.asks.pop(key, None)
        if ask is not None:
            self._no_answer(ask, how, now)
        who = self.whose.pop(key, None)
        if who is not None and self.links.get(who) == key:
            del self.links[who]
            if self.lead is not None:
                self.lead.closed(who, now)
        elif who is not None and key == self.leader_key:
            self._orphan("lost", f"{self._name(who)} was lost (its connection ended)", now, ended=True)
        self._step(now)

    def tick(self, now: float) -> None:
        """Time has passed; to be called several times a second."""
        if now - self._ticked > self.rules.limit_s / 2:  # this process was stopped for a while: so it heard nobody
            self.heard_at = dict.fromkeys(self.heard_at, now)
            for ask in self.asks.values():
                ask.since = now
        self._ticked = now
        if now - self._beaten >= min(self.rules.beat_s, _MOST_BETWEEN_HEARTBEATS_S):
            self._send_heartbeats(now)
        for key, ask in list(self.asks.items()):
            if now - ask.since > (self.rules.limit_s if ask.answered else _ANSWER_S):
                del self.asks[key]
                self.actions.append(("close", key))
                self._no_answer(ask, "silent", now)
        self._listen_for_silence(now)
        self._step(now)

    def rest(self, report: Report, now: float) -> None:
        """This launcher's own processes have all ended, or it is ready for the first round."""
        self.report, self.halt = report, None
        self._report(now)
        self._step(now)

    def leave(self, how: How, why: str, now: float) -> None:
        """This launcher was asked to end; its processes have been told. `how` is "save" or "end"."""
        self.leaving = f"{self._name(self.me.id)} {why}"
        if self.lead is not None:
            self.lead.leaves(self.me.id, how, self.leaving, now)
        elif self.leader:
            self._say(self.leader_key, Leaving(how, self.leaving))

    def bye(self) -> None:
        """This launcher ends now: a planned end, that needs no majority of those who stay."""
        for key in self.whose:
            self._say(key, Bye(self.leaving))

    @property
    def latest_round(self) -> Round | None:
        """The last decision that this launcher has part in: begun, or proposed alone; others may have begun it then."""
        rounds = [each for each in (self.round, self.proposed) if each is not None]
        return max(rounds, key=lambda each: each.number, default=None)

    @property
    def latest(self) -> int:
        """Its number; 0 for none."""
        return self.latest_round.number if self.latest_round is not None else 0

    # The network

    def _send_heartbeats(self, now: float) -> None:
        self._beaten = now
        self._heartbeat += 1
        self._heartbeats[self._heartbeat] = now
        self._heartbeats.pop(self._heartbeat - _HEARTBEATS_REMEMBERED, None)
        for key in (*self.whose, *(key for key, ask in self.asks.items() if ask.answered)):
            self._say(key, Heartbeat(self._heartbeat))

    def trusts_until(self, who: str) -> float:
        """Until when a refused call at a member's place proves that it died as one of us.

        Later it may have lost us, gone on with others and died after that, and these others go on still. What counts is a
        heartbeat of ours that it has answered: a connection that ends may have ended long ago, where the link was cut or this
        launcher was stopped for a while.
        """
        return self.confirmed_at.get(who, -1e9) + min(_UNREPLACED_S, self.rules.limit_s)

    def open(self, place: Place, who: str, purpose: str, now: float, message: Message) -> int:
        """Asks a place something over a new connection."""
        key, self._next_key = self._next_key, self._next_key + 2
        self.asks[key] = Ask(place, who, purpose, now)
        self.actions.append(("open", key, place))
        self._say(key, message)
        return key

    def _say(self, key: int, message: Message) -> None:
        self.actions.append(("send", key, message))

    def say(self, who: str, message: Message) -> None:
        """Sends to a member that has a connection to us."""
        if who in self.links:
            self._say(self.links[who], message)

    def drop(self, who: str, last_word: Message | None = None) -> None:
        """Ends the connection of a member."""
        key = self.links.pop(who, None)
        if key is not None:
            if last_word is not None:
                self._say(key, last_word)
            self.whose.pop(key, None)
            self.actions.append(("close", key))

    def _listen_for_silence(self, now: float) -> None:
        """Asks over a new connection where an old one is silent: a mended link carries that sooner."""
        for key, who in list(self.whose.items()):
            silent_s = now - self.heard_at[who]
            if silent_s > self.rules.limit_s:
                if self.lead is not None:
                    self.lead.silent(who, now)
                elif key == self.leader_key:
                    self._orphan("lost", f"{self._name(who)} was lost (silent for {silent_s:.0f} s)", now)
            elif silent_s > 2 * self.rules.beat_s and not any(
                ask.who == who and now - ask.since < _ASK_AGAIN_S for ask in self.asks.values()
            ):
                self.open(self.known[who].place, who, "probe", now, Probe())

    def _here(self) -> Here:
        return Here(self.me.id, self.round.number if self.round else 0, self.lead is not None, self.born)

    def _name(self, who: str) -> str:
        return called(who, self.round, self.known)

    # Asked by others

    def _greet(self, key: int, message: Hello, now: float) -> None:
        """A launcher that seeks a run."""
        member = message.member
        if member.id == self.me.id:
            return
        if self.leader:
            self._say(key, Later(self.known[self.leader].place, self.me.id))
            return
        members = self.lead.members if self.lead is not None else [self.me.id]
        present = [self.known[who] for who in members if who != member.id]
        problem = objections.disagreement(self.me, self.rules, present, member, message.rules)
        if problem is not None:
            self._say(key, Refused(problem))
            if self.lead is not None:
                self.lead.refused(problem, message)
            return
        self.drop(member.id)
        self.known[member.id] = member
        self.links[member.id], self.whose[key] = key, member.id
        self.heard_at[member.id] = now
        self.newest = max(self.newest, message.round)
        if self.lead is not None:
            self.lead.welcome(member.id, now)
        else:
            self._say(key, Wait(self.latest, self.me.id))

    def _called_home(self, key: int, message: Home, now: float) -> None:
        """A run that began through this launcher's place, and went on elsewhere, asks who is here now."""
        self._say(key, self._here())
        if self.leader or message.run != self.rules.run:
            return
        if self.lead is not None and message.born < self.born and message.id != self.me.id:
            self.notes.append("another run of this name is older: this one ends, and its nodes join that one")
            self.lead.disband(message.place)
            self.move(message.place, now)
        elif self.lead is None and message.place not in self.contacts:
            self.contacts.append(message.place)
            self.founds = False

    # Seeking

    def move(self, place: Place, now: float) -> None:
        """Leaves this run for another: from now on this launcher is one that was never a member of it."""
        self.me = replace(self.me, id=f"{self.me.id}+")
        self.known[self.me.id] = self.me
        self.born = self._wall_of_zero + now
        self.views, self.founds = [], False
        self.round = self.proposed = None
        self.newest = 0
        self.contacts = [place, *(each for each in self.contacts if each != place)]
        self._orphan("lost", "another run of this name goes on", now)

    def _orphan(self, how: str, why: str, now: float, *, ended: bool = False) -> None:
        """There is no leader: ends the processes, and looks for one. `ended`: the leader's end of the connection did."""
        self.trusted_until = self.trusts_until(self.leader) if ended else -1e9
        if how == "left" and self.leader:
            self.dead.add(self.leader)
        self.whose.pop(self.leader_key, None)
        if self.leader:
            self.actions.append(("close", self.leader_key))
        for who in list(self.links):
            self.drop(who, Expelled())
        self.leader, self.leader_key, self.lead = "", -1, None
        self.lost, self.since, self.candidate_since = (how, why), now, None
        self._forget_asks()
        self.answers.clear()
        self._asked = -1e9
        self.stop("save" if how == "left" else "end", why)

    def stand_down(self, why: str, now: float) -> None:
        """Leads no more: too few are left to go on."""
        self.notes.append(why)
        self._orphan("lost", why, now)

    def stop(self, how: How, why: str) -> None:
        """Has this launcher's own processes ended."""
        if self.report is None and (self.halt is None or self.halt[0] != "end"):
            self.halt = (how, why)

    def _step(self, now: float) -> None:
        if self.end is not None:
            return
        if self.lead is not None:
            self.lead.step(now)
        elif not self.leader:
            self._seek(now)

    def _seek(self, now: float) -> None:
        asked = {ask.place for ask in self.asks.values() if ask.purpose == "hello"}
        if now - self._asked >= _ASK_AGAIN_S and not self.leaving:
            self._asked = now
            for place, who in self._to_ask().items():
                if place not in asked:
                    self.open(place, who, "hello", now, Hello(self.me, self.rules.common, self.latest))
        if self.report is None and not self.views:
            return
        if not self.views:
            if self.founds and all(self.answers.get(place, "later") != "later" for place in self.contacts):
                self._take_the_lead([self.me.id], now)
                return
        elif self._is_candidate():
            self.candidate_since = now if self.candidate_since is None else self.candidate_since
            here = {self.me.id, *self.links}
            missing = [each for each in self.views[-1] if each not in here and each not in self.dead]
            if may_go_on(here, self.views, self.dead) and (not missing or now - self.candidate_since >= _SETTLE_S):
                known = dict.fromkeys(each for view in reversed(self.views) for each in view)
                self._take_the_lead([each for each in known if each in here], now)
                return
        else:
            self.candidate_since = None
        self._give_up(now)

    def _forget_asks(self) -> None:
        for key in self.asks:
            self.actions.append(("close", key))
        self.asks.clear()

    def _to_ask(self) -> dict[Place, str]:
        """Places, and the members that they were of: those of the last rounds, and wherever a run may be found."""
        others = (each for view in reversed(self.views) for each in view)
        living = [
            each
            for each in dict.fromkeys(others)
            if each not in self.dead and each != self.me.id and each in self.known
        ]
        places = dict.fromkeys(self.contacts, "")
        return places | {self.known[each].place: each for each in living[:_ASKED_AT_ONCE]}

    def _is_candidate(self) -> bool:
        """Whether nobody who comes before me can lead, and nobody knows of a later decision."""
        if self.newest > self.latest:
            return False
        view = self.views[-1]
        before = [each for each in view[: view.index(self.me.id)] if each not in self.dead]
        return all(self.answers.get(self.known[each].place) in _NO_LAUNCHER for each in before)

    def _take_the_lead(self, members: list[str], now: float) -> None:
        self._forget_asks()
        self.lead = Lead(self, members, self.lost, self.since, now)
        self._send_heartbeats(now)
        self.lead.step(now)

    def _give_up(self, now: float) -> None:
        """Ends where waiting longer helps nobody."""
        waited_s = now - self.since
        if self.views:
            over = self.rules.fixed and self.round is not None and self.round.restarts >= self.rules.max_restarts
            if waited_s > (self.rules.limit_s if over else self.rules.join_s):
                here = len({self.me.id, *self.links} & set(self.views[-1]))
                problem = objections.cut_off(self.lost[1], here, len(self.views[-1]))
                self.end = End(1, self.lost[1], error=problem)
            return
        other_secret = objections.other_secret(self.answers)
        if other_secret is not None and waited_s > _SECRET_S:
            self.end = End(1, error=other_secret)
        elif waited_s > self.rules.join_s:
            self.end = End(1, error=objections.unanswered(self.rules.join_s, self.answers))

    def _answer(self, key: int, message: Message, now: float) -> None:
        ask = self.asks[key]
        if isinstance(message, Here | Wait | Later) and message.here:
            self._nobody_else_at(ask.place, now, message.here)
        if ask.purpose != "hello":
            del self.asks[key]
            self.actions.append(("close", key))
            self._here_is(ask, message if isinstance(message, Here) else None, now)
        elif isinstance(message, Joined):
            self._follow(key, message, now)
        elif isinstance(message, Wait):
            self.answers[ask.place] = "wait" if not message.round else "later"  # it was in a run that may go on
            self.newest = max(self.newest, message.round)
            ask.answered, ask.since = True, now
        elif isinstance(message, Heartbeat | HeartbeatAck):
            ask.since = now
        else:
            del self.asks[key]
            self.actions.append(("close", key))
            if isinstance(message, Refused):
                self.end = End(1, error=message.problem)
            elif isinstance(message, Later):
                self.answers[ask.place] = "later"
                if message.place != self.me.place and message.place not in self._to_ask():
                    self.contacts.append(message.place)
                    self._asked = -1e9
            else:  # `Expelled`: that one has lost its own leader
                self.answers.pop(ask.place, None)

    def _here_is(self, ask: Ask, answer: Here | None, now: float) -> None:
        """Who is at a place that was asked."""
        if answer is not None and ask.purpose == "probe" and ask.who in self.heard_at:
            if answer.here == ask.who:
                self.heard_at[ask.who] = now
            elif self.lead is not None:
                self.lead.silent(ask.who, now)  # another launcher is in its place: the one of before is no more
        if self.lead is not None:
            self.lead.found(ask, answer, now)

    def _no_answer(self, ask: Ask, how: str, now: float) -> None:
        if how == "refused":
            self._nobody_else_at(ask.place, now)
        if ask.purpose == "hello":
            self.answers[ask.place] = how
            if how == "closed":  # it was there a moment ago: ask again
                self.answers.pop(ask.place)
        elif self.lead is not None:
            self.lead.found(ask, None, now)

    def _nobody_else_at(self, place: Place, now: float, who: str = "") -> None:
        """No launcher that was at a place is alive, apart from the one that answers there now; see `trusts_until`."""
        gone = {each.id for each in self.known.values() if each.place == place} - {who, self.me.id}
        if self.lead is not None:
            self.dead |= {each for each in gone & self.lead.doubts if now <= self.trusts_until(each)}
        elif now <= self.trusted_until:
            self.dead |= gone

    # Following

    def _follow(self, key: int, message: Joined, now: float) -> None:
        ask = self.asks.pop(key)
        self._forget_asks()
        # What it calls itself may mean this host here (127.0.1.1): what reached it is its address.
        leader = replace(message.leader, address=ask.place[0], port=ask.place[1])
        self.known[leader.id] = leader
        self.leader, self.leader_key = leader.id, key
        self.whose[key] = self.leader
        self.heard_at[self.leader] = now
        # What this launcher knows of earlier rounds stays: a leader may itself have been left behind and not know it yet.
        self.newest = max(self.newest, message.round)
        for who in list(self.links):
            self.drop(who, Later(leader.place))
        self._send_heartbeats(now)
        self._report(now)

    def _report(self, now: float) -> None:
        """Tells the leader that this launcher's processes have ended."""
        if self.report is not None and self.lead is not None:
            self.lead.rested(self.me.id, self.report, now)
        elif self.report is not None and self.leader:
            self._say(self.leader_key, Rest(self.report))

    def _obey(self, message: Message, now: float) -> None:
        """What the leader says."""
        if isinstance(message, Proposal):
            if self.me.id not in message.round.ids or self.leader not in message.round.ids:
                return
            self.proposed = message.round
            self.known.update((each.id, each) for each in self.proposed.members if each.id != self.leader)
            self.views = [*message.views, self.proposed.ids]
            self._say(self.leader_key, Ready(self.proposed.number))
        elif isinstance(message, Go) and self.proposed is not None and message.round == self.proposed.number:
            self.start(replace(self.proposed, reason=message.reason))
        elif isinstance(message, Halt):
            self.stop(message.how, message.why)
        elif isinstance(message, Over):
            self.end = message.end
        elif isinstance(message, Move):
            self.move(message.place, now)
        elif isinstance(message, Bye):
            self._orphan("left", message.why, now, ended=True)
        elif isinstance(message, Expelled):
            self._orphan("lost", f"{self._name(self.leader)} took this node for lost", now)

    def start(self, decided: Round) -> None:
        """A round begins."""
        self.round = self.begin = decided
        self.born = decided.born
        self.views = [decided.ids]
        decided_on = {each.id: each for each in decided.members}
        self.known = decided_on | {who: self.known[who] for who in (self.me.id, self.leader, *self.links) if who}
        self.dead &= set(decided.ids)
        self.report = self.halt = None
