"""Which launchers take part in a run, as a state machine of one launcher without sockets or clocks. It has three states:

    seek    asks every place that it knows for a run to join (`search.py`); the launcher at the first place founds one
    follow  has joined a run: starts and stops its processes as the leader decides (`following.py`)
    lead    decides (`leadership.py`). There is one leader: the first member in the order of joining

    follow -- the connection to the leader ends, or is silent for silence_limit_s --> seek
    seek   -- all members before this one are dead or silent, and a quorum is present (`has_quorum`) --> lead

Inputs: `on_message`, `on_closed` and `tick` come from the network, `on_store_answer` from the store; `processes_ended` and
`drain` from the processes and the signals of this launcher. Outputs, in `state`: `peers.actions` for the network;
`take_round`, `stop_request` and `end` for the processes.

What a launcher knows in all three is its `LauncherState` (`state.py`). The three change it by its methods and know nothing of
each other; this file passes inputs to the one that is due, and changes from one to the other.
docs/adr/0021-membership-guarantees.md states the guarantees, and tests/simulated_network.py simulates them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from paceline.launch.rounds import Place, Report, StopMode
from paceline_hosts.membership import errors
from paceline_hosts.membership.following import Following
from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.messages import (
    Announce,
    Draining,
    Expelled,
    Heartbeat,
    HeartbeatAck,
    Join,
    Joined,
    JournalMessage,
    Leave,
    Message,
    NoLeader,
    Probe,
    ProcessesEnded,
    Redirect,
    Refused,
    StackMessage,
    Status,
)
from paceline_hosts.membership.peers import NEVER, Request
from paceline_hosts.membership.search import Search
from paceline_hosts.membership.state import LauncherState, LeaderLost
from paceline_hosts.membership.store import StoreOfRun

_ASK_AGAIN_S = 0.5


class Membership:
    """The state machine of one launcher.

    Args:
        state: what this launcher knows and wants, whoever leads.
        now: the time in seconds.

    Attributes:
        state: the same.
        search: the search for a leader.
        role: what this launcher does at present: the search, while there is no leader.
        store: the use of the store; None without one.
        journal_messages, stack_messages: what members, or the leader, have said that decides nothing, each with the sender;
            `journals.py` and `stack_exchange.py` take it out.
    """

    def __init__(self, state: LauncherState, now: float) -> None:
        self.state = state
        self.peers = state.peers
        self.search = Search(state, now)
        self.role: Search | Following | Leadership = self.search
        self.store = StoreOfRun(state, state.witness) if state.witness is not None else None
        self.journal_messages: list[tuple[str, JournalMessage]] = []
        self.stack_messages: list[tuple[str, StackMessage]] = []
        # Until this time a refused connection at the place of the lost leader proves that it is dead
        # (`Peers.death_proof_until`).
        self._leader_death_proof_until = NEVER

    # Inputs

    def on_message(self, key: int, message: Message, now: float) -> None:
        """Takes in a message."""
        if key in self.peers.requests:
            self._on_answer(key, message, now)
        elif key in self.peers.member_of:
            member_id = self.peers.member_of[key]
            self.peers.last_heard_at[member_id] = now
            if isinstance(message, Heartbeat | HeartbeatAck):
                self.peers.on_heartbeat(key, message)
                return  # it changes no decision, and the leader of 2,000 nodes receives thousands each second
            elif isinstance(message, JournalMessage):
                self.journal_messages.append((member_id, message))
                return
            elif isinstance(message, StackMessage):
                self.stack_messages.append((member_id, message))
                return
            elif isinstance(self.role, Leadership):
                self.role.on_message(member_id, message, now)
            elif isinstance(self.role, Following) and member_id == self.role.leader_id:
                self._leader_lost(self.role.on_message(message), now)
        elif isinstance(message, Join):
            self._on_join(key, message, now)
        elif isinstance(message, Probe):
            self.peers.send_over(key, self._status())
        elif isinstance(message, Announce):
            self._on_announce(key, message, now)
        self._step(now)

    def on_closed(self, key: int, how: str, now: float) -> None:
        """Takes in the end of a connection.

        Args:
            key: the number of the connection.
            how: "refused" by the host, "silent" (no connection within the timeout), "closed", or a reason of `HandshakeError`.
            now: the time in seconds.
        """
        request = self.peers.requests.pop(key, None)
        if request is not None:
            self._on_no_answer(request, how, now)
        member_id = self.peers.member_of.pop(key, None)
        if member_id is not None and self.peers.connection_of.get(member_id) == key:
            del self.peers.connection_of[member_id]
            if isinstance(self.role, Leadership):
                self.role.on_closed(member_id, now)
        elif member_id is not None and isinstance(self.role, Following) and key == self.role.connection:
            why = f"{self.state.name_of(member_id)} was lost (its connection ended)"
            self._leader_lost(LeaderLost("lost", why, connection_ended=True), now)
        self._step(now)

    def tick(self, now: float) -> None:
        """Handles timeouts; to be called several times a second."""
        for request in self.peers.tick(now):
            self._on_no_answer(request, "silent", now)
        self._check_silence(now)
        self._step(now)

    def processes_ended(self, report: Report, now: float) -> None:
        """The processes of this launcher have all ended, or it is ready for the first round."""
        self.state.processes_ended(report)
        self._send_report(now)
        self._step(now)

    def drain(self, how: StopMode, why: str, now: float) -> None:
        """This launcher was asked to end, and has asked its processes to end."""
        me = self.state.me.id
        self.state.asked_to_end(f"{self.state.name_of(me)} {why}")
        if isinstance(self.role, Leadership):
            self.role.member_drains(me, how, self.state.leaving, now)
        else:
            self.send_to_leader(Draining(how, self.state.leaving))

    def on_store_answer(self, key: int, value: str | None, trouble: str, now: float) -> None:
        """Takes in an answer of the store; `value` is None where it gave none, and `trouble` says why."""
        if self.store is not None:
            self.store.on_answer(key, value, trouble, now)
        self.tick(now)

    def send_to_leader(self, message: Message) -> None:
        """Sends a message to the launcher that leads, if that is another one."""
        if isinstance(self.role, Following):
            self.role.send(message)

    def leave(self) -> None:
        """This launcher ends as planned: the others need no quorum to go on without it."""
        for key in self.peers.member_of:
            self.peers.send_over(key, Leave(self.state.leaving))

    @property
    def leader_id(self) -> str:
        """The id of the other launcher that leads; "" for none."""
        return self.role.leader_id if isinstance(self.role, Following) else ""

    def waiting_for(self) -> str:
        """What a launcher waits for that has begun no round yet, in words; no error so far."""
        state = self.state
        rules = state.rules
        if isinstance(self.role, Leadership):
            present = [state.known_members[member_id].host for member_id in self.role.members]
            verb = "is" if len(present) == 1 else "are"
            return (
                f"{len(present)} of {rules.least} nodes {verb} here ({', '.join(present)}). "
                f"The start waits for the others, {rules.join_timeout_s:g} s at most."
            )
        if isinstance(self.role, Following):
            return "this node has found node 0, and waits with it for the other nodes."
        asked = ", ".join(f"{address}:{port}" for address, port in state.contacts) or "the store"
        return f"no launcher answers at {asked} yet. This one asks for {rules.join_timeout_s:g} s at most."

    def _check_silence(self, now: float) -> None:
        """Finds silent connections, and first asks over a new one: a repaired network carries that sooner than the old one."""
        rules = self.state.rules
        asked_at = self.peers.members_asked_at()
        for key, member_id in list(self.peers.member_of.items()):
            silent_s = now - self.peers.last_heard_at[member_id]
            if silent_s > rules.silence_limit_s:
                if isinstance(self.role, Leadership):
                    self.role.on_silence(member_id, now)
                elif isinstance(self.role, Following) and key == self.role.connection:
                    why = f"{self.state.name_of(member_id)} was lost (silent for {silent_s:.0f} s)"
                    self._leader_lost(LeaderLost("lost", why), now)
            elif silent_s > 2 * rules.heartbeat_s and now - asked_at.get(member_id, NEVER) >= _ASK_AGAIN_S:
                self.peers.ask(self.state.place_of(member_id), member_id, Probe(), now)

    def _status(self) -> Status:
        return Status(self.state.me.id, self.state.begun, isinstance(self.role, Leadership), self.state.founded_at)

    # Questions of other launchers

    def _on_join(self, key: int, message: Join, now: float) -> None:
        """A launcher asks to join."""
        state = self.state
        member = message.member
        if member.id == state.me.id:
            return
        if isinstance(self.role, Following):
            self.peers.send_over(key, Redirect(state.place_of(self.leader_id), state.me.id))
            return
        by_node = self.role.by_node if isinstance(self.role, Leadership) else {state.me.node: state.me}
        problem = errors.disagreement(state.me, state.rules, by_node.get(member.node), member, message.rules)
        if problem is not None:
            self.peers.send_over(key, Refused(problem))
            if isinstance(self.role, Leadership):
                self.role.refused(problem, message)
            return
        state.known_members[member.id] = member
        self.peers.accept(key, member.id, now)
        state.hear_of_round(message.round)
        if isinstance(self.role, Leadership):
            self.role.admit(member.id, now)
        else:
            self.peers.send_over(key, NoLeader(state.latest_number, state.me.id))

    def _on_announce(self, key: int, message: Announce, now: float) -> None:
        """The leader of a run asks who is at this place: its run began here, and went on elsewhere."""
        state = self.state
        self.peers.send_over(key, self._status())
        if isinstance(self.role, Following) or message.run != state.rules.run:
            return
        if isinstance(self.role, Leadership) and message.founded_at < state.founded_at and message.id != state.me.id:
            state.notes.append("another run of this name is older; this run ends, and its nodes join the other one")
            self._leader_lost(self.role.send_all_to(message.place), now)
        elif self.role is self.search and message.place not in state.contacts:
            state.contacts.append(message.place)
            state.found(False)

    # Seeking

    def _leader_lost(self, lost: LeaderLost | None, now: float) -> None:
        """If there is no leader any more: stops the processes, and looks for a leader."""
        if lost is None:
            return
        state = self.state
        if lost.other_run is not None:
            state.become_new(lost.other_run, now)
        self._leader_death_proof_until = NEVER
        following = self.role
        if isinstance(following, Following):
            # If this launcher only waited to join, the leader may have begun a round with others, who go on without it.
            # Then the end of the connection proves nothing.
            if following.is_member and lost.connection_ended:
                self._leader_death_proof_until = self.peers.death_proof_until(following.leader_id)
            if following.is_member and lost.how == "left":
                state.dead.add(following.leader_id)
            self.peers.close(following.connection)
        for member_id in list(self.peers.connection_of):
            self.peers.disconnect(member_id, Expelled())
        self.role = self.search
        self.peers.end_requests()
        self.search.begin(lost.how, lost.why, now)
        state.request_stop("save" if lost.how == "left" else "end", lost.why)

    def _step(self, now: float) -> None:
        if self.state.end is not None:
            return
        if isinstance(self.role, Leadership):
            self._leader_lost(self.role.step(now), now)
        elif self.role is self.search:
            self._seek(now)
        if self.store is not None:
            self._use(self.store, now)

    def _use(self, store: StoreOfRun, now: float) -> None:
        if isinstance(self.role, Leadership):
            store.renew(chain(self.role.members, self.role.waiting), now)
            return
        if self.role is self.search:
            store.seek(self.search, now)
        is_answered = not set(self.search.answers.values()) <= {"refused", "silent"}
        store.check_version(is_answered or isinstance(self.role, Following))

    def _seek(self, now: float) -> None:
        members = self.search.step(now)
        if members:
            self._become_leader(members, now)
        elif self.state.configurations or self.state.report is not None:  # if not, it is not ready for a first round
            end = self.search.end(now)
            if end is not None:
                self.state.finish(end)

    def _become_leader(self, members: list[str], now: float) -> None:
        self.peers.end_requests()
        leadership = Leadership(self.state, members, self.search.lost, self.search.since, now)
        self.role = leadership
        self.peers.send_heartbeats(now)
        self._leader_lost(leadership.step(now), now)

    def _on_answer(self, key: int, message: Message, now: float) -> None:
        request = self.peers.requests[key]
        if isinstance(message, Status | NoLeader | Redirect) and message.member_id:
            self._mark_dead(request.place, now, except_for=message.member_id)
        if not isinstance(request.question, Join):
            self.peers.end_request(key)
            self._on_status(request, message if isinstance(message, Status) else None, now)
        elif isinstance(message, Joined):
            self._become_follower(key, message, now)
        else:
            self.search.on_answer(key, request, message, now)

    def _on_status(self, request: Request, answer: Status | None, now: float) -> None:
        """Takes in who is at a place that was asked."""
        probed = isinstance(request.question, Probe) and request.member_id in self.peers.last_heard_at
        if answer is not None and probed:
            if answer.member_id == request.member_id:
                self.peers.last_heard_at[request.member_id] = now
            elif isinstance(self.role, Leadership):
                # Another launcher is at its place, so the member has ended.
                self.role.on_silence(request.member_id, now)
        if isinstance(self.role, Leadership):
            self._leader_lost(self.role.on_status(request, answer), now)

    def _on_no_answer(self, request: Request, how: str, now: float) -> None:
        if how == "refused":
            self._mark_dead(request.place, now)
        if not isinstance(request.question, Join):
            if isinstance(self.role, Leadership):
                self._leader_lost(self.role.on_status(request, None), now)
        else:
            self.search.on_no_answer(request.place, how)

    def _mark_dead(self, place: Place, now: float, except_for: str = "") -> None:
        """Marks the launchers of a place as dead, except one that answers there now (`Peers.death_proof_until`)."""
        state = self.state
        if isinstance(self.role, Leadership):
            there = {member_id for member_id, asked in self.role.suspects.items() if asked == place} - {except_for}
            state.dead.update(member_id for member_id in there if now <= self.peers.death_proof_until(member_id))
        elif now <= self._leader_death_proof_until:
            there = {member.id for member in state.known_members.values() if member.place == place}
            state.dead.update(there - {except_for, state.me.id})

    # Following

    def _become_follower(self, key: int, message: Joined, now: float) -> None:
        request = self.peers.requests.pop(key)
        self.peers.end_requests()
        # The address that the leader has for itself may mean another host here (127.0.1.1). The address that reached it counts.
        address, port = request.place
        leader = replace(message.leader, address=address, port=port)
        self.state.known_members[leader.id] = leader
        self.role = Following(self.state, leader.id, key, message.is_member)
        self.peers.follow(key, leader.id, now)
        # What this launcher knows of earlier rounds is kept: the leader may have been left behind without knowing it.
        self.state.hear_of_round(message.round)
        for member_id in list(self.peers.connection_of):
            self.peers.disconnect(member_id, Redirect(leader.place))
        self.peers.send_heartbeats(now)
        self._send_report(now)

    def _send_report(self, now: float) -> None:
        """Reports to the leader that the processes of this launcher have ended."""
        report = self.state.report
        if report is not None and isinstance(self.role, Leadership):
            self.role.member_stopped(self.state.me.id, report, now)
        elif report is not None:
            self.send_to_leader(ProcessesEnded(report))
