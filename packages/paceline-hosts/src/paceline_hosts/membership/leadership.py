"""What the leader decides: who takes part in a round, when it begins and why it ends.

    gather -> propose -> run -> halt -> gather ...      once for each failure, and for each time that nodes join

- gather: no process runs. The leader waits for enough nodes and, before the first round, a moment longer for more.
- propose: the leader names the members to all of them, and each accepts. A member that has accepted goes on only with a quorum
  of these members.
- run: the processes run.
- halt: the processes are being stopped. Meanwhile the leader learns which nodes were lost, so that one decision covers all
  failures that happen together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

from paceline.base.errors import Problem
from paceline.base.exits import PREEMPTED
from paceline.launch.rounds import End, Member, Place, Report, Round, StopMode
from paceline_hosts.membership import errors
from paceline_hosts.membership.messages import (
    Accept,
    Announce,
    Commit,
    Decline,
    Draining,
    Expelled,
    Join,
    Joined,
    Leave,
    Message,
    Probe,
    ProcessesEnded,
    Proposal,
    RunEnded,
    Status,
    StopProcesses,
    SwitchRun,
)
from paceline_hosts.membership.peers import Request
from paceline_hosts.membership.rules import Cause, LossKind
from paceline_hosts.membership.state import LauncherState, LeaderLost

_ANNOUNCE_S = 0.5
_HOSTS_SHOWN = 8  # of those that join, in messages
# A later entry explains the end of a round better: a host that is lost makes the processes of other hosts fail.
_CAUSES = ("", "failed", "grow", "left", "lost")
Stage = Literal["gather", "propose", "run", "halt"]


class Leadership:
    """The state of a launcher that leads.

    Args:
        state: of this launcher.
        members: the ids of the members so far, in the order of joining.
        lost: whether the leader before was lost or has left, and why.
        since: when that was noticed.
        now: the time in seconds.

    A leader of thousands of nodes hears from each of them in a moment, so that no message may cost a look at all of them.
    """

    def __init__(
        self, state: LauncherState, members: Iterable[str], lost: tuple[LossKind, str], since: float, now: float
    ) -> None:
        self.state = state
        self.peers = state.peers
        self.rules = state.rules
        self.members = dict.fromkeys(members)  # a set in the order of joining
        # Launchers that wait to become members, and since when.
        self.waiting = {member_id: now for member_id in self.peers.connection_of if member_id not in self.members}
        self.ready: dict[str, Report] = {}  # of those that wait, the ones of which no process runs
        self.reports: dict[str, Report] = {}  # of members whose processes have all ended
        # Launchers here by the number that the user gave them; -1 is none.
        self.by_node = {member.node: member for member in map(self._member, (*self.members, *self.waiting))}
        self.leaving: set[str] = set()
        # Members whose connection ended, and where each was asked whether it is alive. They have not answered yet.
        self.suspects: dict[str, Place] = {}
        self.accepted_by: set[str] = set()
        self.committed = list(state.configurations)
        self.stopped_how: StopMode | Literal[""] = ""  # the last `StopProcesses.how` of this round
        self.first_report_at: float | None = None
        self.announced_at = float("-inf")
        latest = state.latest_round
        if latest is None:
            self.restarts = 0
            self.number = 0
            self.stage: Stage = "gather"
            self.cause = Cause()
            self.noticed_at = now
            self.enough_since: float | None = None
        else:
            # Others may have begun a round that was only proposed here. Their processes must end first.
            self.restarts = latest.restarts
            self.number = latest.number
            self.stage = "halt"
            self.cause = Cause(*lost)
            self.noticed_at = since
            self.enough_since = now
        self.gathering_since = now
        # A leader that was lost cannot take part in a save any more, in which its ranks would be waited for.
        how_to_stop: StopMode = "end" if lost[0] == "lost" else "save"
        if latest is not None:
            self.stopped_how = how_to_stop
        for member_id in self.peers.connection_of:
            self.peers.last_heard_at[member_id] = now
            self.peers.send(member_id, Joined(state.me, self.number, is_member=member_id in members))
            if latest is not None and member_id in members:
                self.peers.send(member_id, StopProcesses(how_to_stop, lost[1]))
        if state.report is not None:
            self.reports[state.me.id] = state.report

    # What comes in

    def on_message(self, member_id: str, message: Message, now: float) -> None:
        """Takes in a message of a member, or of a launcher that waits."""
        if isinstance(message, ProcessesEnded):
            self.member_stopped(member_id, message.report, now)
        elif isinstance(message, Accept) and message.round == self.number:
            self.accepted_by.add(member_id)
        elif isinstance(message, Decline) and message.round == self.number and self.stage == "propose":
            self._count_too(message.configurations, now)
        elif isinstance(message, Draining):
            self.member_drains(member_id, message.how, message.why, now)
        elif isinstance(message, Leave):
            self.state.dead.add(member_id)
            self.peers.disconnect(member_id)
            why = message.why or f"{self.state.name_of(member_id)} left"
            self._remove(member_id, Cause("left", why, member_id), now)

    def member_stopped(self, member_id: str, report: Report, now: float) -> None:
        """Takes in that all processes of a member have ended."""
        if member_id in self.waiting:
            self.ready[member_id] = report
        if member_id not in self.members:
            return
        self.reports[member_id] = report
        if self.first_report_at is None:
            self.first_report_at = now
        if report.kind == "failed":
            why = f"{self.state.name_of(member_id)}: {report.what}"
            self._end_round(Cause("failed", why, member_id, report.at, report.again), "end", now)

    def member_drains(self, member_id: str, how: StopMode, why: str, now: float) -> None:
        """A member was asked to end: all processes save, and the others go on without it."""
        if member_id in self.members:
            self.leaving.add(member_id)
            self._end_round(Cause("left", why, member_id), how, now)

    def admit(self, member_id: str, now: float) -> None:
        """Takes in a launcher that wants to join."""
        if member_id in self.members:  # it lost its connection and ended its processes before this launcher noticed
            why = f"{self.state.name_of(member_id)} lost its connection"
            self._remove(member_id, Cause("lost", why, member_id), now)
        # It waits even if it was a member a moment ago: the next round begins only after all processes of this one have ended.
        self.waiting.setdefault(member_id, now)
        member = self._member(member_id)
        self.by_node[member.node] = member
        self.peers.send(member_id, Joined(self.state.me, self.number, is_member=False))

    def refused(self, problem: Problem, message: Join) -> None:
        """A launcher with other settings was refused.

        Before the first round the run ends: its nodes were started with different commands. A launcher of another run has only
        asked at the wrong place.
        """
        if self.state.round is None and message.rules[3] == self.rules.run:
            self.finish(End(1, problem.what, error=problem))

    def on_closed(self, member_id: str, now: float) -> None:
        """A connection has ended: asks at once whether that launcher is still alive."""
        if member_id in self.members:
            # The end of a connection does not prove that the launcher is dead: the network may have cut it.
            self.suspects[member_id] = self.state.place_of(member_id)
            self.peers.ask(self.suspects[member_id], member_id, Probe(), now)
        why = f"{self.state.name_of(member_id)} was lost (its connection ended)"
        self._remove(member_id, Cause("lost", why, member_id), now)

    def on_silence(self, member_id: str, now: float) -> None:
        """A member has sent nothing for too long."""
        why = f"{self.state.name_of(member_id)} was lost (silent for {self.rules.silence_limit_s:g} s)"
        self.peers.disconnect(member_id, Expelled())
        self._remove(member_id, Cause("lost", why, member_id), now)

    def on_status(self, request: Request, answer: Status | None) -> LeaderLost | None:
        """Takes in the answer to `Probe` or `Announce`; None for no answer. Returns as `step`."""
        if isinstance(request.question, Probe):
            self.suspects.pop(request.member_id, None)
            if answer is not None and answer.leads and answer.round > self.number:
                return self._step_down("the others went on without this node; it joins them")
            return None
        if answer is None or not answer.leads or answer.member_id == self.state.me.id:
            return None
        if answer.founded_at < self.state.founded_at:  # the older of two runs with the same name goes on
            return self.send_all_to(request.place)
        return None

    # Deciding

    def step(self, now: float) -> LeaderLost | None:
        """Makes the decisions that are due. Returns why this launcher leads no longer, if so."""
        self._announce(now)
        if self.stage == "run":
            self._watch_round(now)
        # This runs after every message of a member: only what the stage asks for is looked at.
        # While a suspect may still be alive, nobody knows whether a quorum is left.
        if self.stage == "halt" and not self.suspects and self._all_in(self.reports):
            self._decide(now)
        if self.stage == "gather" and self.state.end is None:
            lost = self._gather(now)
            if lost is not None:
                return lost
        if self.stage == "propose" and self._all_in(self.accepted_by):
            self._commit(now)
        return None

    def _all_in(self, heard: Collection[str]) -> bool:
        """Returns whether all members are among those who were heard. The lengths alone settle it most of the time."""
        return len(heard) >= len(self.members) and all(member_id in heard for member_id in self.members)

    def _step_down(self, note: str, why: str = "") -> LeaderLost:
        """Stops leading, because too few members are left to go on."""
        self.state.notes.append(note)
        return LeaderLost("lost", why or note)

    def _remove(self, member_id: str, cause: Cause, now: float) -> None:
        """Removes a launcher that was lost or has left."""
        was_member = member_id in self.members
        self._forget(member_id)
        if was_member:
            # A member that was asked to end has saved together with the others, who may still be writing. One that is gone
            # without that would be waited for in a save.
            may_save = cause.kind == "left" and member_id in self.leaving
            self._end_round(cause, "save" if may_save else "end", now)

    def _forget(self, member_id: str) -> None:
        """Takes a launcher from those that are members or wait."""
        for known in (self.members, self.reports, self.waiting, self.ready):
            known.pop(member_id, None)
        member = self.state.known_members.get(member_id)
        if member is not None and self.by_node.get(member.node) == member:
            del self.by_node[member.node]

    def _end_round(self, cause: Cause, how: StopMode, now: float) -> None:
        """Stops all processes, and keeps the cause that explains the end of the round best."""
        if self.stage == "run":
            self.stage = "halt"
            self.noticed_at = now
            self.cause = cause
        elif self.stage == "propose":
            self.stage = "gather"
            self.gathering_since = now
        weight = _CAUSES.index(cause.kind) - _CAUSES.index(self.cause.kind)
        if weight > 0 or (weight == 0 and cause.at < self.cause.at):
            self.cause = cause
        # Processes that end at different times make each other fail. This failure must not interrupt those that still save.
        if cause.kind == "failed" and self.cause.kind in ("left", "grow"):
            return
        # A lost rack means many losses. The others get one message, and a second one only if they have no more time to save.
        # "end" is never followed by "save": processes that were asked to end have no time left to save.
        if self.stopped_how != "end" and how != self.stopped_how:
            self.stopped_how = how
            for member in self.members:
                if member not in self.reports:
                    self.peers.send(member, StopProcesses(how, cause.why))
        self.state.request_stop(how, cause.why)

    def _watch_round(self, now: float) -> None:
        """Ends a round whose processes have ended by themselves, or that more nodes can join."""
        if len(self.reports) == len(self.members):
            if self._kinds() == {"done"}:
                self.finish(End(0))
            else:
                self.stage = "halt"
                self.noticed_at = now
            return
        waited_s = 0.0 if self.first_report_at is None else now - self.first_report_at
        if waited_s > self.rules.grace_s and "preempted" in self._kinds():
            self._end_round(Cause("", "processes of another node have saved and ended"), "end", now)
        # Nodes that wait join together: as soon as they fill the range, or some time after the first one. No node joins while
        # processes end, because the run may be complete.
        # A launcher that waits has sent a report once none of its processes runs; a new one sends it at once.
        room = self.rules.most - len(self.members)
        if not self.ready or not room or self.reports:
            return
        first = next(iter(self.ready))
        if len(self.ready) >= room or now - self.waiting[first] >= self.rules.last_call_timeout_s:
            hosts = [self._member(member_id).host for member_id in islice(self.ready, _HOSTS_SHOWN)]
            more = len(self.ready) - len(hosts)
            others = f" and {more} more" if more else ""
            self._end_round(Cause("grow", f"{', '.join(hosts)}{others} joined"), "save", now)

    def _kinds(self) -> set[str]:
        """Returns how the processes of members have ended."""
        return {report.kind for report in self.reports.values()}

    def _decide(self, now: float) -> None:
        """All processes have ended: decides whether another round follows."""
        for member_id in self.leaving & self.members.keys():
            self._forget(member_id)
        if self.state.me.id in self.leaving:
            return  # the next leader decides
        self.state.dead.update(self.leaving)
        self.leaving.clear()
        kinds = self._kinds()
        cause = self.cause
        # With a range of nodes a lost node is no failure. With a fixed number it counts as one.
        if cause.kind == "failed" or (cause.kind == "lost" and self.rules.fixed):
            self.restarts += 1
            if self.restarts > self.rules.max_restarts or not cause.again:
                self.finish(End(1, cause.why, cause.member_id))
                return
        elif cause.kind == "grow" and kinds == {"done"}:
            self.finish(End(0))
            return
        elif cause.kind == "left" and len(self.members) < self.rules.least:
            saved = kinds <= {"preempted"}
            self.finish(End(PREEMPTED if saved else 1, cause.why, cause.member_id))
            return
        elif cause.kind == "" and "preempted" in kinds:
            self.finish(End(PREEMPTED, "all processes have saved and ended"))
            return
        self.stage = "gather"
        self.gathering_since = now

    def _gather(self, now: float) -> LeaderLost | None:
        """Begins a round once there are enough nodes. Returns why this launcher leads no longer, if so."""
        may_go_on = self.state.has_quorum(self.members, self.committed, now)
        if may_go_on is None and now - self.gathering_since <= self.rules.silence_limit_s:
            return None  # the store has not answered yet
        if not may_go_on:
            note = "too few nodes are left to go on; this node looks for the others"
            return self._step_down(note, self.cause.why)
        self._admit_waiting()
        if self.state.me.id not in self.reports:
            return None
        if len(self.members) < self.rules.least:
            self._wait_for_least(now)
        elif self._need_not_wait_for_more(now):
            self._propose()
        return None

    def _admit_waiting(self) -> None:
        """Makes members of those that wait: they are in the order of joining, so whoever came first gets the room there is."""
        room = self.rules.most - len(self.members)
        for member_id in sorted(self.ready, key=self.waiting.__getitem__)[:room]:
            del self.waiting[member_id]
            self.members[member_id] = None
            self.reports[member_id] = self.ready.pop(member_id)

    def _wait_for_least(self, now: float) -> None:
        """Ends the run if the nodes that it needs at least have not come in time."""
        self.enough_since = None
        if now - self.gathering_since > self.rules.join_timeout_s:
            members = [self._member(member_id) for member_id in self.members]
            problem = errors.too_few(self.rules, members, self.state.me.port, self.cause.why)
            self.finish(End(1, self.cause.why, error=problem))

    def _need_not_wait_for_more(self, now: float) -> bool:
        """Returns whether a round begins with the members that are here, which are enough."""
        if self.enough_since is None:
            self.enough_since = now
        # Only the first round waits for more nodes than it needs. Later rounds begin at once; other nodes can join afterwards.
        waited = self.state.round is not None or now - self.enough_since >= self.rules.last_call_timeout_s
        return waited or len(self.members) == self.rules.most

    def _propose(self) -> None:
        """Sends the list of members to all of them."""
        order = [self._member(member_id) for member_id in self.members]
        # With `--node-rank` on every node the user's numbers decide. Otherwise the order of joining numbers the nodes.
        if all(member.node >= 0 for member in order):
            order.sort(key=lambda member: member.node)
        store_port = self.reports[order[0].id].store_port
        self.number += 1
        proposed = Round(self.number, self.restarts, tuple(order), store_port, self.cause.why, self.state.founded_at)
        self.stage = "propose"
        self.accepted_by = {self.state.me.id}
        self.state.accept(proposed, self.state.me.id, self.committed)
        proposal = Proposal(proposed, tuple(self.committed))
        for member_id in self.members:
            self.peers.send(member_id, proposal)

    def _count_too(self, configurations: Sequence[tuple[str, ...]], now: float) -> None:
        """A member knows of rounds that may have begun while this launcher was unreachable: a quorum of these is needed too."""
        assert self.state.proposed is not None, "this stage follows a proposal"
        self.committed += [ids for ids in configurations if ids not in self.committed]
        self.state.accept(self.state.proposed, self.state.me.id, self.committed)
        self.stage = "gather"
        self.gathering_since = now

    def _commit(self, now: float) -> None:
        """All members have accepted: the round begins."""
        proposed = self.state.proposed
        assert proposed is not None, "this stage follows a proposal"
        reason = self.cause.why
        if self.cause.kind:
            reason += f"; {now - self.noticed_at:.1f} s to stop all processes and decide"
        for member_id in self.members:
            self.peers.send(member_id, Commit(proposed.number, reason))
        self.reports.clear()
        self.state.begin_round(replace(proposed, reason=reason), leader_id="")
        self.committed = [proposed.ids]
        self.stage = "run"
        self.cause = Cause()
        self.stopped_how = ""
        self.first_report_at = None

    def finish(self, end: End) -> None:
        """Ends the run for all launchers."""
        for member_id in (*self.members, *self.waiting):
            self.peers.send(member_id, RunEnded(end))
        self.state.finish(end)

    def send_all_to(self, place: Place) -> LeaderLost:
        """Tells all launchers to join another run, as this one does."""
        for member_id in (*self.members, *self.waiting):
            self.peers.send(member_id, SwitchRun(place))
        return LeaderLost.to_other_run(place)

    def _announce(self, now: float) -> None:
        """Asks which launchers are at the contacts. A host that comes back may know no other place, and begin a run there."""
        if now - self.announced_at < _ANNOUNCE_S or self.rules.most == 1:
            return
        self.announced_at = now
        me = self.state.me
        announcement = Announce(me.place, self.rules.run, me.id, self.state.founded_at)
        here = {self.state.place_of(member_id) for member_id in (*self.members, *self.waiting)}
        known_places = here | self.peers.places_asked(Announce)
        for place in self.state.contacts:
            if place not in known_places:
                self.peers.ask(place, "", announcement, now)

    def _member(self, member_id: str) -> Member:
        return self.state.known_members[member_id]
