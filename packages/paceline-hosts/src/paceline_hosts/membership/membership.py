"""Which launchers take part in a run, as a state machine of one launcher without sockets or clocks. It has three states:

    seek    asks every place that it knows for a run to join (`search.py`); the launcher at the first place founds one
    follow  has joined a run: starts and stops its processes as the leader decides (`following.py`)
    lead    decides (`leadership.py`). There is one leader: the first member in the order of joining

    follow -- the connection to the leader ends, or is silent for silence_limit_s --> seek
    seek   -- all members before this one are dead or silent, and a quorum is present (`has_quorum`) --> lead

Inputs: `on_message`, `on_closed` and `tick` come from the network; `processes_ended` and `drain` from the processes and the
signals of this launcher. Outputs: `peers.actions` for the network; `round_to_start`, `stop_request` and `end` for the
processes. docs/adr/0021-membership-guarantees.md states the guarantees, and tests/simulated_network.py simulates them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from paceline.launch.rounds import End, Member, Place, Report, Round, StopMode
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
from paceline_hosts.membership.peers import NEVER, Peers, Request
from paceline_hosts.membership.rules import LossKind, Rules, has_quorum
from paceline_hosts.membership.search import Search
from paceline_hosts.membership.store import StoreOfRun
from paceline_hosts.membership.witness import Witness

_ASK_AGAIN_S = 0.5


class Membership:
    """The state of one launcher.

    Args:
        me: this launcher.
        rules: its settings.
        is_founder: whether it begins a run if it finds none.
        contacts: the places to ask for a run.
        now: the time in seconds of a monotonic clock, as in all methods here.
        wall: the time of day (seconds since the epoch).
        witness: the store that all launchers use; None without one.

    Attributes:
        search: the search for a leader, while there is none.
        following: the state under another leader; None while there is none.
        leadership: the state while this launcher leads; None while it does not.
        peers: the connections; its `actions` are for the network.
        round_to_start: a round whose processes must be started. The launcher sets it to None when it starts them.
        stop_request: how and why the processes must be stopped; None while they may run.
        end: set when this launcher must end.
        notes: lines for the user.
        journal_messages, stack_messages: what members, or the leader, have said that decides nothing, each with the sender;
            `journals.py` and `stack_exchange.py` take it out.
    """

    def __init__(
        self,
        me: Member,
        rules: Rules,
        is_founder: bool,
        contacts: Sequence[Place],
        now: float,
        wall: float = 0.0,
        witness: Witness | None = None,
    ) -> None:
        self.me = me
        self.rules = rules
        self.founded_at = wall
        self._wall_at_zero = wall - now
        self.peers = Peers(rules, now)
        self.search = Search(self, is_founder, contacts, now)
        self.store = StoreOfRun(self, witness) if witness is not None else None
        self.notes: list[str] = []
        self.round_to_start: Round | None = None
        self.stop_request: tuple[StopMode, str] | None = None
        self.end: End | None = None
        self.journal_messages: list[tuple[str, JournalMessage]] = []
        self.stack_messages: list[tuple[str, StackMessage]] = []

        # None before the launcher is ready for the first round, and while processes run.
        self.report: Report | None = None
        self.round: Round | None = None  # the last round that this launcher has begun
        self.proposed: Round | None = None
        self.proposed_by = ""
        # Sets of members. A quorum of each of them is needed to go on.
        self.configurations: list[tuple[str, ...]] = []
        self.dead: set[str] = set()
        self.known_members: dict[str, Member] = {me.id: me}

        self.leaving = ""
        self.following: Following | None = None
        self.leadership: Leadership | None = None
        # Until this time a refused connection at the place of the lost leader proves that it is dead
        # (`Peers.death_proof_until`).
        self.leader_death_proof_until = NEVER

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
            elif self.leadership is not None:
                self.leadership.on_message(member_id, message, now)
            elif self.following is not None and member_id == self.following.leader_id:
                self.following.on_message(message, now)
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
            if self.leadership is not None:
                self.leadership.on_closed(member_id, now)
        elif member_id is not None and self.following is not None and key == self.following.connection:
            why = f"{self.name_of(member_id)} was lost (its connection ended)"
            self.lose_leader("lost", why, now, connection_ended=True)
        self._step(now)

    def tick(self, now: float) -> None:
        """Handles timeouts; to be called several times a second."""
        for request in self.peers.tick(now):
            self._on_no_answer(request, "silent", now)
        self._check_silence(now)
        self._step(now)

    def processes_ended(self, report: Report, now: float) -> None:
        """The processes of this launcher have all ended, or it is ready for the first round."""
        self.report = report
        self.stop_request = None
        self._send_report(now)
        self._step(now)

    def drain(self, how: StopMode, why: str, now: float) -> None:
        """This launcher was asked to end, and has asked its processes to end."""
        self.leaving = f"{self.name_of(self.me.id)} {why}"
        if self.leadership is not None:
            self.leadership.member_drains(self.me.id, how, self.leaving, now)
        else:
            self.send_to_leader(Draining(how, self.leaving))

    def send_to_leader(self, message: Message) -> None:
        """Sends a message to the launcher that leads, if that is another one."""
        if self.following is not None:
            self.following.send(message)

    def leave(self) -> None:
        """This launcher ends as planned: the others need no quorum to go on without it."""
        for key in self.peers.member_of:
            self.peers.send_over(key, Leave(self.leaving))

    @property
    def leader_id(self) -> str:
        """The id of the other launcher that leads; "" for none."""
        return self.following.leader_id if self.following is not None else ""

    @property
    def latest_round(self) -> Round | None:
        """The latest round with this launcher. If it was only proposed here, other members may have begun it."""
        if self.round is None or self.proposed is None:
            return self.round or self.proposed
        return self.round if self.round.number >= self.proposed.number else self.proposed

    @property
    def latest_number(self) -> int:
        """The number of the latest round; 0 for none."""
        return self.latest_round.number if self.latest_round is not None else 0

    def _check_silence(self, now: float) -> None:
        """Finds silent connections, and first asks over a new one: a repaired network carries that sooner than the old one."""
        for key, member_id in list(self.peers.member_of.items()):
            silent_s = now - self.peers.last_heard_at[member_id]
            if silent_s > self.rules.silence_limit_s:
                if self.leadership is not None:
                    self.leadership.on_silence(member_id, now)
                elif self.following is not None and key == self.following.connection:
                    why = f"{self.name_of(member_id)} was lost (silent for {silent_s:.0f} s)"
                    self.lose_leader("lost", why, now)
            elif silent_s > 2 * self.rules.heartbeat_s and now - self.peers.last_asked_at(member_id) >= _ASK_AGAIN_S:
                self.peers.ask(self.known_members[member_id].place, member_id, Probe(), now)

    def _status(self) -> Status:
        number = self.round.number if self.round is not None else 0
        return Status(self.me.id, number, self.leadership is not None, self.founded_at)

    def name_of(self, member_id: str) -> str:
        """What to call a launcher in messages to the user: by its number in the last round, else by the number it was given."""
        if self.round is not None and member_id in self.round.ids:
            node = self.round.index_of(member_id)
            return f"node {node} ({self.round.members[node].host})"
        member = self.known_members.get(member_id)
        return "?" if member is None else member.shown

    # Questions of other launchers

    def _on_join(self, key: int, message: Join, now: float) -> None:
        """A launcher asks to join."""
        member = message.member
        if member.id == self.me.id:
            return
        if self.following is not None:
            self.peers.send_over(key, Redirect(self.known_members[self.leader_id].place, self.me.id))
            return
        members = self.leadership.members if self.leadership is not None else [self.me.id]
        present = [self.known_members[member_id] for member_id in members if member_id != member.id]
        problem = errors.disagreement(self.me, self.rules, present, member, message.rules)
        if problem is not None:
            self.peers.send_over(key, Refused(problem))
            if self.leadership is not None:
                self.leadership.refused(problem, message)
            return
        self.known_members[member.id] = member
        self.peers.accept(key, member.id, now)
        self.search.highest_round = max(self.search.highest_round, message.round)
        if self.leadership is not None:
            self.leadership.admit(member.id, now)
        else:
            self.peers.send_over(key, NoLeader(self.latest_number, self.me.id))

    def _on_announce(self, key: int, message: Announce, now: float) -> None:
        """The leader of a run asks who is at this place: its run began here, and went on elsewhere."""
        self.peers.send_over(key, self._status())
        if self.following is not None or message.run != self.rules.run:
            return
        if self.leadership is not None and message.founded_at < self.founded_at and message.id != self.me.id:
            self.notes.append("another run of this name is older; this run ends, and its nodes join the other one")
            self.leadership.send_all_to(message.place)
            self.switch_run(message.place, now)
        elif self.leadership is None and message.place not in self.search.contacts:
            self.search.contacts.append(message.place)
            self.search.is_founder = False

    # Seeking

    def switch_run(self, place: Place, now: float) -> None:
        """Leaves this run for another one, which this launcher joins like a new launcher."""
        self.me = replace(self.me, id=f"{self.me.id}+")
        self.known_members[self.me.id] = self.me
        self.founded_at = self._wall_at_zero + now
        self.configurations = []
        self.round = self.proposed = None
        self.search.begin_at(place)
        self.lose_leader("lost", "another run of this name goes on", now)

    def lose_leader(self, how: LossKind, why: str, now: float, *, connection_ended: bool = False) -> None:
        """The leader is gone: stops the processes, and looks for a leader."""
        self.leader_death_proof_until = NEVER
        following = self.following
        if following is not None:
            # If this launcher only waited to join, the leader may have begun a round with others, who go on without it.
            # Then the end of the connection proves nothing.
            if following.is_member and connection_ended:
                self.leader_death_proof_until = self.peers.death_proof_until(following.leader_id)
            if following.is_member and how == "left":
                self.dead.add(following.leader_id)
            self.peers.close(following.connection)
        for member_id in list(self.peers.connection_of):
            self.peers.disconnect(member_id, Expelled())
        self.following = None
        self.leadership = None
        self.peers.end_requests()
        self.search.begin(how, why, now)
        self.request_stop("save" if how == "left" else "end", why)

    def step_down(self, note: str, why: str, now: float) -> None:
        """Stops leading, because too few members are left to go on."""
        self.notes.append(note)
        self.lose_leader("lost", why or note, now)

    def request_stop(self, how: StopMode, why: str) -> None:
        """Asks for the processes of this launcher to be stopped."""
        if self.report is None and (self.stop_request is None or self.stop_request[0] != "end"):
            self.stop_request = (how, why)

    def _step(self, now: float) -> None:
        if self.end is not None:
            return
        if self.leadership is not None:
            self.leadership.step(now)
        elif self.following is None:
            self._seek(now)
        if self.store is not None:
            self.store.step(now)

    def has_quorum(self, here: Collection[str], configurations: Sequence[Sequence[str]], now: float) -> bool | None:
        """Returns whether these members may go on; None while the store has not said who has its vote."""
        if self.store is not None:
            return self.store.has_quorum(here, configurations, now)
        return has_quorum(here, configurations, self.dead)

    def _seek(self, now: float) -> None:
        members = self.search.step(now)
        if members:
            self._become_leader(members, now)
        elif self.configurations or self.report is not None:  # if not, this launcher is not ready for a first round
            self.end = errors.end_of_search(self, now)

    def _become_leader(self, members: list[str], now: float) -> None:
        self.peers.end_requests()
        self.leadership = Leadership(self, members, self.search.lost, self.search.since, now)
        self.peers.send_heartbeats(now)
        self.leadership.step(now)

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
            elif self.leadership is not None:
                # Another launcher is at its place, so the member has ended.
                self.leadership.on_silence(request.member_id, now)
        if self.leadership is not None:
            self.leadership.on_status(request, answer, now)

    def _on_no_answer(self, request: Request, how: str, now: float) -> None:
        if how == "refused":
            self._mark_dead(request.place, now)
        if not isinstance(request.question, Join):
            if self.leadership is not None:
                self.leadership.on_status(request, None, now)
        else:
            self.search.on_no_answer(request.place, how)

    def _mark_dead(self, place: Place, now: float, except_for: str = "") -> None:
        """Marks the launchers of a place as dead, except one that answers there now (`Peers.death_proof_until`)."""
        members_there = {member.id for member in self.known_members.values() if member.place == place}
        gone = members_there - {except_for, self.me.id}
        if self.leadership is not None:
            suspects = gone & self.leadership.suspects
            self.dead |= {member_id for member_id in suspects if now <= self.peers.death_proof_until(member_id)}
        elif now <= self.leader_death_proof_until:
            self.dead |= gone

    # Following

    def _become_follower(self, key: int, message: Joined, now: float) -> None:
        request = self.peers.requests.pop(key)
        self.peers.end_requests()
        # The address that the leader has for itself may mean another host here (127.0.1.1). The address that reached it counts.
        address, port = request.place
        leader = replace(message.leader, address=address, port=port)
        self.known_members[leader.id] = leader
        self.following = Following(self, leader.id, key, message.is_member)
        self.peers.follow(key, leader.id, now)
        # What this launcher knows of earlier rounds is kept: the leader may have been left behind without knowing it.
        self.search.highest_round = max(self.search.highest_round, message.round)
        for member_id in list(self.peers.connection_of):
            self.peers.disconnect(member_id, Redirect(leader.place))
        self.peers.send_heartbeats(now)
        self._send_report(now)

    def _send_report(self, now: float) -> None:
        """Reports to the leader that the processes of this launcher have ended."""
        if self.report is not None and self.leadership is not None:
            self.leadership.member_stopped(self.me.id, self.report, now)
        elif self.report is not None:
            self.send_to_leader(ProcessesEnded(self.report))

    def begin_round(self, decided: Round) -> None:
        """Begins a round."""
        self.round = self.round_to_start = decided
        self.founded_at = decided.founded_at
        self.configurations = [decided.ids]
        self.dead &= set(decided.ids)
        self.report = self.stop_request = None
        # Launchers of earlier rounds are dropped, so that memory does not grow when hosts come and go.
        connected_ids = (self.me.id, self.leader_id, *self.peers.connection_of)
        connected = {member_id: self.known_members[member_id] for member_id in connected_ids if member_id}
        self.known_members = {member.id: member for member in decided.members} | connected
