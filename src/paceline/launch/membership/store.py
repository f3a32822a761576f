"""What one launcher does with the store: finds the run, asks for the vote where half of it is lost, keeps the record alive."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from paceline.base.version import VERSION
from paceline.launch.membership.errors import other_version
from paceline.launch.membership.rounds import End, Place, has_quorum
from paceline.launch.membership.witness import Standing, Witness

if TYPE_CHECKING:
    from paceline.launch.membership.leadership import Leadership
    from paceline.launch.membership.membership import Membership


class StoreOfRun:
    """The store's part in one launcher's membership.

    Args:
        membership: the launcher's part.
        witness: the store, as this launcher sees it.
    """

    def __init__(self, membership: Membership, witness: Witness) -> None:
        self.membership = membership
        self.witness = witness
        self._places: tuple[Place, ...] = ()
        self._trouble = ""

    def on_answer(self, key: int, value: str | None, trouble: str, now: float) -> None:
        """The store has answered: where it says that launchers are, they are asked; where it said so before, no more."""
        self.witness.on_answer(key, value, trouble, now)
        places = self.witness.places
        if places != self._places:
            contacts = [place for place in self.membership.search.contacts if place not in self._places]
            others = [place for place in places if place not in contacts and place != self.membership.me.place]
            self.membership.search.contacts = contacts + others
            self._places = places
        self.membership.tick(now)

    def leave(self, now: float) -> bool:
        """Takes this launcher out of the store as it ends; to be called until it says that this is done."""
        return self.witness.leave(self.membership.me.place, now)

    def has_quorum(self, here: Collection[str], configurations: Sequence[Sequence[str]], now: float) -> bool | None:
        """Whether those who are here may go on; None while the store has not said whose its vote is."""
        membership = self.membership
        if has_quorum(here, configurations, membership.dead, False):
            return True
        if not has_quorum(here, configurations, membership.dead, True):
            return False
        begun = membership.round.number if membership.round is not None else 0
        accepted = (0, "")
        if membership.proposed is not None:
            accepted = (membership.proposed.number, membership.proposed_by)
        vote = self.witness.vote(Standing(membership.me.id, begun, membership.latest_number + 1, accepted), now)
        if vote is False and self.witness.record is not None:  # others have decided already
            membership.search.highest_round = max(membership.search.highest_round, self.witness.record.number)
        return vote

    def step(self, now: float) -> None:
        """Looks whether something is to be asked or written."""
        if self.membership.leadership is not None:
            self._renew(self.membership.leadership, now)
            return
        if not self.membership.leader_id:
            self.witness.look(now)  # where others may be by now
            self._found(now)
        self._check_version()

    def _found(self, now: float) -> None:
        """Lets this launcher begin a run, where the store and the places that it names have none."""
        membership = self.membership
        search = membership.search
        if membership.configurations or membership.report is None or search.is_founder:
            return
        search.is_founder = self.witness.found(membership.me.id, membership.me.place, search.is_nowhere(), now)

    def _renew(self, leadership: Leadership, now: float) -> None:
        """As the leader: keeps the record of this run, and says when the store goes and when it comes back."""
        membership = self.membership
        here = (*leadership.members, *leadership.waiting)
        places = [membership.known_members[member_id].place for member_id in here]
        begun = membership.round.number if membership.round is not None else 0
        self.witness.renew(membership.me.id, begun, places, now)
        trouble = self.witness.why_not
        if trouble and not self._trouble:
            membership.notes.append(
                f"no vote of the store ({trouble}): this run goes on as long as more than half of it is left"
            )
        elif self._trouble and not trouble:
            membership.notes.append(f"{self.witness.name} is there again")
        self._trouble = trouble

    def why_not(self) -> str:
        """Why the store has not let this part of the run go on."""
        return self.witness.why_not or f"{self.witness.name} has let the others go on"

    def _check_version(self) -> None:
        """Ends a launcher that has found a run of another version of Paceline, before it has part in a round.

        A record that nobody stands for says nothing: it may be of a run that is no more.
        """
        membership, record = self.membership, self.witness.record
        is_answered = bool(membership.leader_id) or bool(
            set(membership.search.answers.values()) - {"refused", "silent"}
        )
        if record is not None and record.version != VERSION and is_answered and not membership.configurations:
            membership.end = End(1, error=other_version(record.host, record.version))
