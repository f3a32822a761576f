"""What the leader decides: who takes part in a round, when it begins and why it ends.

    gather -> propose -> run -> halt -> gather ...                    one pass for each failure, one for each node more

- gather: all processes have ended; waits for enough nodes, and at the start a moment longer for more
- propose: all members are told who takes part; each says that it knows (so that no two sets can both go on)
- run: the processes run
- halt: they are being ended; whoever was lost is found out by now, so that the next decision counts for all
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.base.errors import Problem
from paceline.base.exits import PREEMPTED
from paceline.launch import objections
from paceline.launch.messages import (
    Bye,
    Expelled,
    Go,
    Halt,
    Hello,
    Here,
    Home,
    How,
    Joined,
    Leaving,
    Message,
    Move,
    Over,
    Probe,
    Proposal,
    Ready,
    Rest,
)  # fmt: skip
from paceline.launch.rounds import Cause, End, Member, Place, Report, Round, may_go_on

if TYPE_CHECKING:
    from paceline.launch.membership import Ask, Membership

_CALL_HOME_S = 0.5
_WEIGHT = ("", "failed", "grow", "left", "lost")  # what explains a round's end: the later in this list


class Lead:
    """The leader's part of one launcher.

    Args:
        own: the launcher.
        members: who takes part so far, in the order of joining.
        lost: how ("lost" or "left") and why the leader before went.
        since: when that was noticed.
        now: seconds.
    """

    def __init__(self, own: Membership, members: list[str], lost: tuple[str, str], since: float, now: float) -> None:
        self.own, self.rules = own, own.rules
        self.members = members
        self.waiting = {who: now for who in own.links if who not in members}  # since when
        self.at_rest: dict[str, Report] = {}
        self.leaving: set[str] = set()
        self.doubts: set[str] = set()  # members whose connection ended: are they dead?
        self.ready: set[str] = set()
        self.proposed: Round | None = None
        latest = own.latest_round
        self.restarts, self.number = (latest.restarts, latest.number) if latest else (0, 0)
        self.committed = list(own.views)
        # Others may have begun a round that was only proposed here: their processes are to be ended first.
        self.stage = "halt" if latest else "gather"
        self.cause = Cause(lost[0], lost[1]) if latest else Cause()
        self.noticed = since if latest else now
        self.gathering_since, self.enough_since = now, now if latest else None
        self.called_home = -1e9
        self.first_rest: float | None = None
        for who in own.links:
            own.heard_at[who] = now
            own.say(who, Joined(own.me, self.number))
            if latest is not None and who in members:
                own.say(who, Halt("end" if lost[0] == "lost" else "save", lost[1]))
        if own.report is not None:
            self.at_rest[own.me.id] = own.report

    # What comes in

    def heard(self, who: str, message: Message, now: float) -> None:
        """A word from a member, or from one that waits to be taken in."""
        if isinstance(message, Rest):
            self.rested(who, message.report, now)
        elif isinstance(message, Ready) and self.proposed is not None and message.round == self.proposed.number:
            self.ready.add(who)
        elif isinstance(message, Leaving):
            self.leaves(who, message.how, message.why, now)
        elif isinstance(message, Bye):
            self.own.dead.add(who)
            self.own.drop(who)
            self._without(who, Cause("left", message.why or f"{self.own._name(who)} left", who), now)

    def rested(self, who: str, report: Report, now: float) -> None:
        """All processes of a member have ended."""
        self.at_rest[who] = report
        self.first_rest = now if self.first_rest is None else self.first_rest
        if report.kind == "failed" and who in self.members:
            self._end_round(Cause("failed", f"{self.own._name(who)}: {report.what}", who, report.at), "end", now)

    def leaves(self, who: str, how: How, why: str, now: float) -> None:
        """A member was asked to end: all save, and the others go on without it."""
        if who in self.members:
            self.leaving.add(who)
            self._end_round(Cause("left", why, who), how, now)

    def welcome(self, who: str, now: float) -> None:
        """A launcher wants to take part."""
        if who in self.members:  # it has lost us, and ended its processes, before we noticed
            self._without(who, Cause("lost", f"{self.own._name(who)} lost its connection", who), now)
        self.waiting.setdefault(who, now)
        self.own.say(who, Joined(self.own.me, self.number))

    def refused(self, problem: Problem, message: Hello) -> None:
        """A launcher was told something else: before the first round, this run's nodes were started differently, and none
        can begin. A launcher of another run has only come to a wrong place."""
        if self.own.round is None and message.rules[-1] == self.rules.run:
            self.finish(End(1, problem.what, error=problem))

    def closed(self, who: str, now: float) -> None:
        """A connection has ended: asks at once whether that launcher is still there."""
        if who in self.members:
            self.doubts.add(who)
            self.own.open(self.own.known[who].place, who, "probe", now, Probe())
        self._without(who, Cause("lost", f"{self.own._name(who)} was lost (its connection ended)", who), now)

    def silent(self, who: str, now: float) -> None:
        """A member has given no sign of life for too long."""
        why = f"{self.own._name(who)} was lost (silent for {self.rules.limit_s:g} s)"
        self.own.drop(who, Expelled())
        self._without(who, Cause("lost", why, who), now)

    def found(self, ask: Ask, answer: Here | None, now: float) -> None:
        """What came of a question that was asked at some place; None for no answer."""
        leads = answer is not None and answer.leads
        if ask.purpose == "probe":
            self.doubts.discard(ask.who)
            if answer is not None and leads and answer.round > self.number:
                self.own.stand_down("the others went on without this node; it joins them", now)
        elif answer is not None and leads and answer.here != self.own.me.id and answer.born < self.own.born:
            self.disband(ask.place)
            self.own.move(ask.place, now)

    # Deciding

    def step(self, now: float) -> None:
        """Looks whether something is to be decided."""
        self._call_home(now)
        if self.stage == "run":
            self._look(now)
        if self.stage == "halt" and not self.doubts and all(who in self.at_rest for who in self.members):
            self._settle(now)
        if self.stage == "gather" and self.own.end is None:
            self._gather(now)
        if self.stage == "propose" and self.ready >= set(self.members):
            self._go(now)

    def _without(self, who: str, cause: Cause, now: float) -> None:
        """Somebody is gone."""
        self.waiting.pop(who, None)
        self.at_rest.pop(who, None)
        if who in self.members:
            self.members.remove(who)
            self._end_round(cause, "save" if cause.kind == "left" and who in self.leaving else "end", now)

    def _end_round(self, cause: Cause, how: How, now: float) -> None:
        """Has all processes ended, and keeps what explains it best."""
        if self.stage == "run":
            self.stage, self.noticed, self.cause = "halt", now, cause
        elif self.stage == "propose":
            self.stage, self.gathering_since = "gather", now
        weight, known = _WEIGHT.index(cause.kind), _WEIGHT.index(self.cause.kind)
        if weight > known or (weight == known and cause.at < self.cause.at):
            self.cause = cause
        if cause.kind == "failed" and self.cause.kind in ("left", "grow"):
            return  # processes that end at different moments disturb each other: those that save may go on doing so
        for member in self.members:
            if member not in self.at_rest:
                self.own.say(member, Halt(how, cause.why))
        self.own.stop(how, cause.why)

    def _look(self, now: float) -> None:
        """Ends a round whose processes end by themselves, or that more nodes can join."""
        kinds = [self.at_rest[who].kind for who in self.members if who in self.at_rest]
        if len(kinds) == len(self.members):
            if all(kind == "done" for kind in kinds):
                self.finish(End(0))
            else:
                self.stage, self.noticed = "halt", now
            return
        if "preempted" in kinds and self.first_rest is not None and now - self.first_rest > self.rules.grace_s:
            self._end_round(Cause("", "processes of another node have saved and left"), "end", now)
        come = {who: since for who, since in self.waiting.items() if who in self.at_rest}
        room = self.rules.most - len(self.members)
        if come and room and not kinds and (
            len(come) >= room or now - min(come.values()) >= self.rules.last_call_s
        ):  # fmt: skip
            names = ", ".join(self.own.known[who].host for who in come)
            self._end_round(Cause("grow", f"{names} joined"), "save", now)

    def _settle(self, now: float) -> None:
        """All processes have ended: is there to be another round?"""
        self.members = [who for who in self.members if who not in self.leaving]
        if self.own.me.id in self.leaving:
            return  # whoever comes next decides
        self.own.dead |= self.leaving
        self.leaving.clear()
        kinds = {self.at_rest[who].kind for who in self.members}
        kind, why, who = self.cause.kind, self.cause.why, self.cause.who
        if kind == "grow" and kinds == {"done"}:
            self.finish(End(0))
            return
        if kind == "failed" or (kind == "lost" and self.rules.fixed):
            self.restarts += 1
            if self.restarts > self.rules.max_restarts:
                self.finish(End(1, why, who))
                return
        elif kind == "left" and len(self.members) < self.rules.least:
            self.finish(End(PREEMPTED if kinds <= {"preempted"} else 1, why, who))
            return
        elif kind == "" and "preempted" in kinds:
            self.finish(End(PREEMPTED, "all processes have saved and left"))
            return
        self.stage, self.gathering_since = "gather", now

    def _gather(self, now: float) -> None:
        """Begins a round once there are enough nodes."""
        if not may_go_on(self.members, self.committed, self.own.dead):
            self.own.stand_down("too few nodes are left to go on; this one looks for the others", now)
            return
        for who in [who for who in self.waiting if who in self.at_rest][: self.rules.most - len(self.members)]:
            del self.waiting[who]
            self.members.append(who)
        here = len(self.members)
        if self.own.me.id not in self.at_rest:
            return
        if here < self.rules.least:
            self.enough_since = None
            if now - self.gathering_since > self.rules.join_s:
                known = [self.own.known[who] for who in self.members]
                problem = objections.too_few(self.rules, known, self.own.me.port, self.cause.why)
                self.finish(End(1, self.cause.why, error=problem))
            return
        self.enough_since = now if self.enough_since is None else self.enough_since
        first = self.own.round is None
        if here == self.rules.most or not first or now - self.enough_since >= self.rules.last_call_s:
            self._propose(now)

    def _propose(self, now: float) -> None:
        """Tells all members who takes part."""
        order = [self.own.known[who] for who in self.members]
        if all(each.node >= 0 for each in order):
            order.sort(key=lambda each: each.node)
        self.number += 1
        self.proposed = Round(
            self.number,
            self.restarts,
            tuple(order),
            self.at_rest[order[0].id].store_port,
            self.cause.why,
            self.own.born,
        )
        self.ready, self.stage = {self.own.me.id}, "propose"
        self.own.views = [*self.committed, self.proposed.ids]
        for who in self.members:
            self.own.say(who, Proposal(self.proposed, tuple(self.committed)))

    def _go(self, now: float) -> None:
        """All know: begins."""
        assert self.proposed is not None
        took = f"; {now - self.noticed:.1f} s to end all and decide" if self.cause.kind else ""
        reason = self.cause.why + took
        for who in self.members:
            self.own.say(who, Go(self.proposed.number, reason))
        self.own.start(replace(self.proposed, reason=reason))
        self.committed = [self.proposed.ids]
        for who in self.members:
            self.at_rest.pop(who, None)
        self.stage, self.cause, self.first_rest = "run", Cause(), None

    def finish(self, end: End) -> None:
        """The end of all."""
        for who in (*self.members, *self.waiting):
            self.own.say(who, Over(end))
        self.own.end = end

    def disband(self, place: Place) -> None:
        """Sends all to another run."""
        for who in (*self.members, *self.waiting):
            self.own.say(who, Move(place))

    def _call_home(self, now: float) -> None:
        """Asks who is where a run may be looked for: a host that comes back may know of no other place."""
        if now - self.called_home < _CALL_HOME_S or self.rules.most == 1:
            return
        self.called_home = now
        here = {self._place(who) for who in (*self.members, *self.waiting)}
        asked = {ask.place for ask in self.own.asks.values() if ask.purpose == "home"}
        for place in self.own.contacts:
            if place not in here and place not in asked:
                home = Home(self.own.me.place, self.rules.run, self.own.me.id, self.own.born)
                self.own.open(place, "", "home", now, home)

    def _place(self, who: str) -> Place:
        known: Member = self.own.known[who]
        return known.place
