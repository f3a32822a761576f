"""What a launcher knows and wants, whoever leads: the record that its search, its following and its leadership share.

Its fields are set by its methods alone. Whoever leads or follows says by a `LeaderLost` that there is no leader any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from paceline.launch.rounds import End, Member, Place, Report, Round, StopMode
from paceline_hosts.membership.peers import Peers
from paceline_hosts.membership.rules import LossKind, Rules, has_quorum
from paceline_hosts.membership.witness import Standing, Witness


@dataclass(frozen=True)
class LeaderLost:
    """Why a launcher has no leader any more, itself or another one.

    Attributes:
        how, why: whether the leader was lost or has left, and a sentence about it.
        connection_ended: whether its connection ended, which may prove its death.
        other_run: where another run of this name goes on, which this launcher joins as a new launcher.
    """

    how: LossKind
    why: str
    connection_ended: bool = False
    other_run: Place | None = None

    @classmethod
    def to_other_run(cls, place: Place) -> LeaderLost:
        """Returns the loss of a leader whose run ends because another one goes on at `place`."""
        return cls("lost", "another run of this name goes on", other_run=place)


class LauncherState:
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
        is_founder, contacts: as given, and changed by what was learned since.
        highest_round: the highest number of a round that any launcher has reported.
        peers: the connections; its `actions` are for the network.
        report: how the processes have ended; None while they run, and before the launcher is ready for the first round.
        round: the last round that this launcher has begun.
        proposed, proposed_by: the last round that it has accepted, and the launcher that proposed it.
        configurations: sets of members. A quorum of each of them is needed to go on.
        dead: launchers that are proved to be dead, or have left.
        leaving: why this launcher was asked to end; "" if it was not.
        stop_request: how and why the processes must be stopped; None while they may run.
        end: set when this launcher must end.
        notes: lines for the user.
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
        self.witness = witness
        self.peers = Peers(rules, now)
        self.is_founder = is_founder
        self.contacts = [place for place in contacts if place != me.place]
        self.highest_round = 0
        self.known_members: dict[str, Member] = {me.id: me}

        self.report: Report | None = None
        self.round: Round | None = None
        self.proposed: Round | None = None
        self.proposed_by = ""
        self.configurations: list[tuple[str, ...]] = []
        self.dead: set[str] = set()

        self.leaving = ""
        self._round_to_start: Round | None = None
        self.stop_request: tuple[StopMode, str] | None = None
        self.end: End | None = None
        self.notes: list[str] = []

    # -- what it knows -----------------------------------------------------------------------------------------

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

    @property
    def begun(self) -> int:
        """The number of the last round that this launcher has begun; 0 for none."""
        return self.round.number if self.round is not None else 0

    def name_of(self, member_id: str) -> str:
        """What to call a launcher in messages to the user: by its number in the last round, else by the number it was given."""
        if self.round is not None and member_id in self.round.node_of:
            node = self.round.node_of[member_id]
            return f"node {node} ({self.round.members[node].host})"
        member = self.known_members.get(member_id)
        return "?" if member is None else member.shown

    def place_of(self, member_id: str) -> Place:
        """Returns the place of a launcher that is known."""
        return self.known_members[member_id].place

    def has_quorum(self, here: Collection[str], configurations: Sequence[Sequence[str]], now: float) -> bool | None:
        """Returns whether these members may go on; None while the store has not said who has its vote."""
        if self.witness is None:
            return has_quorum(here, configurations, self.dead)
        if has_quorum(here, configurations, self.dead, False):
            return True
        if not has_quorum(here, configurations, self.dead, True):
            return False
        accepted = (0, "")
        if self.proposed is not None:
            accepted = (self.proposed.number, self.proposed_by)
        vote = self.witness.vote(Standing(self.me.id, self.begun, self.latest_number + 1, accepted), now)
        if vote is False and self.witness.record is not None:  # other launchers have the vote
            self.hear_of_round(self.witness.record.number)
        return vote

    # -- what it learns ----------------------------------------------------------------------------------------

    def hear_of_round(self, number: int) -> None:
        """Notes that some launcher knows of a round."""
        self.highest_round = max(self.highest_round, number)

    def found(self, may_found: bool) -> None:
        """Sets whether this launcher begins a run if it finds none."""
        self.is_founder = may_found

    def accept(self, proposed: Round, by: str, configurations: Sequence[tuple[str, ...]]) -> None:
        """Accepts a proposal, or makes one. From now on a quorum of its members is needed too.

        They may begin the round although this launcher does not learn of it.
        """
        self.proposed = proposed
        self.proposed_by = by
        self.configurations = [*configurations, proposed.ids]

    def begin_round(self, decided: Round, leader_id: str) -> None:
        """Begins a round. `leader_id` is the other launcher that leads; "" for none."""
        self.round = self._round_to_start = decided
        self.founded_at = decided.founded_at
        self.configurations = [decided.ids]
        self.dead &= set(decided.ids)
        self.report = self.stop_request = None
        # Launchers of earlier rounds are dropped, so that memory does not grow when hosts come and go.
        connected_ids = (self.me.id, leader_id, *self.peers.connection_of)
        connected = {member_id: self.known_members[member_id] for member_id in connected_ids if member_id}
        self.known_members = {member.id: member for member in decided.members} | connected

    def become_new(self, place: Place, now: float) -> None:
        """Forgets its run, and becomes a new launcher, which asks at `place` first."""
        self.me = replace(self.me, id=f"{self.me.id}+")
        self.known_members[self.me.id] = self.me
        self.founded_at = self._wall_at_zero + now
        self.configurations = []
        self.round = self.proposed = None
        self.highest_round = 0
        self.is_founder = False
        if place in self.contacts:
            self.contacts.remove(place)
        self.contacts.insert(0, place)

    # -- what it wants -----------------------------------------------------------------------------------------

    def request_stop(self, how: StopMode, why: str) -> None:
        """Asks for the processes of this launcher to be stopped."""
        if self.report is None and (self.stop_request is None or self.stop_request[0] != "end"):
            self.stop_request = (how, why)

    def take_round(self) -> Round | None:
        """Returns the round whose processes must be started now, once; None for none."""
        begun = self._round_to_start
        self._round_to_start = None
        return begun

    def processes_ended(self, report: Report) -> None:
        """Notes that no process of this launcher runs."""
        self.report = report
        self.stop_request = None

    def asked_to_end(self, why: str) -> None:
        """Notes that this launcher was asked to end."""
        self.leaving = why

    def finish(self, end: End) -> None:
        """Decides that this launcher ends."""
        self.end = end
