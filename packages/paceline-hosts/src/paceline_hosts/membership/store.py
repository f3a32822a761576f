"""How one launcher uses the store: to find the run, to get the vote if half of the nodes are lost, and to renew the record."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from paceline.base.version import VERSION
from paceline.launch.rounds import End, Place
from paceline_hosts.membership.errors import other_version
from paceline_hosts.membership.rules import has_quorum
from paceline_hosts.membership.witness import Standing, Witness

if TYPE_CHECKING:
    from paceline_hosts.membership.leadership import Leadership
    from paceline_hosts.membership.membership import Membership


class StoreOfRun:
    """Connects the membership of one launcher with the store.

    Args:
        membership: the state of this launcher.
        witness: the store, as this launcher sees it.
    """

    def __init__(self, membership: Membership, witness: Witness) -> None:
        self.membership = membership
        self.witness = witness
        self._places: tuple[Place, ...] = ()
        self._trouble = ""

    def on_answer(self, key: int, value: str | None, trouble: str, now: float) -> None:
        """Takes in an answer of the store. The places that it names replace those that it named before among the contacts."""
        self.witness.on_answer(key, value, trouble, now)
        places = self.witness.places
        if places != self._places:
            contacts = [place for place in self.membership.search.contacts if place not in self._places]
            others = [place for place in places if place not in contacts and place != self.membership.me.place]
            self.membership.search.contacts = contacts + others
            self._places = places
        self.membership.tick(now)

    def leave(self, now: float) -> bool:
        """Removes this launcher from the store at its end; to be called until it returns true."""
        return self.witness.leave(self.membership.me.place, now)

    def has_quorum(self, here: Collection[str], configurations: Sequence[Sequence[str]], now: float) -> bool | None:
        """Returns whether these members may go on; None while the store has not said who has its vote."""
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
        if vote is False and self.witness.record is not None:  # other launchers have the vote
            membership.search.highest_round = max(membership.search.highest_round, self.witness.record.number)
        return vote

    def step(self, now: float) -> None:
        """Sends the requests that are due."""
        if self.membership.leadership is not None:
            self._renew(self.membership.leadership, now)
            return
        if not self.membership.leader_id:
            self.witness.look(now)  # other launchers may have moved
            self._found(now)
        self._check_version()

    def _found(self, now: float) -> None:
        """Lets this launcher begin a run, if neither the store nor the places that it names have one."""
        membership = self.membership
        search = membership.search
        if membership.configurations or membership.report is None or search.is_founder:
            return
        search.is_founder = self.witness.found(membership.me.id, membership.me.place, search.is_nowhere(), now)

    def _renew(self, leadership: Leadership, now: float) -> None:
        """Renews the record, as the leader, and notes when the store is lost and when it is back."""
        membership = self.membership
        here = (*leadership.members, *leadership.waiting)
        places = [membership.known_members[member_id].place for member_id in here]
        begun = membership.round.number if membership.round is not None else 0
        self.witness.renew(membership.me.id, begun, places, now)
        trouble = self.witness.why_not
        if trouble and not self._trouble:
            membership.notes.append(
                f"the store cannot vote ({trouble}): this run goes on while more than half of its nodes are left"
            )
        elif self._trouble and not trouble:
            membership.notes.append(f"{self.witness.name} can be reached again")
        self._trouble = trouble

    def why_not(self) -> str:
        """Why the store has not given its vote to this part of the run."""
        return self.witness.why_not or f"{self.witness.name} gave its vote to the others"

    def _check_version(self) -> None:
        """Ends a launcher that has found a run of another version of Paceline, before its first round.

        A record does not count if no launcher that it names answers: its run may have ended.
        """
        membership = self.membership
        record = self.witness.record
        is_answered = bool(membership.leader_id) or bool(
            set(membership.search.answers.values()) - {"refused", "silent"}
        )
        if record is not None and record.version != VERSION and is_answered and not membership.configurations:
            membership.end = End(1, error=other_version(record.host, record.version))
