"""`StackExchange`: the launcher that leads collects the stacks of the ranks of all hosts for one report.

a member      a user asks there, or its ranks are stuck    -- StacksAsked -->       the leader
all members   collect the stacks of their ranks            <-- StacksWanted --
              send at most 0.5 MB for each host             -- StacksCollected -->   one report of all ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.launch.nodes import GatheredPlaces
from paceline.world.stacks.parse import RankPlace
from paceline_hosts.membership.following import Following
from paceline_hosts.membership.leadership import Leadership
from paceline_hosts.membership.messages import StacksAsked, StacksCollected, StacksWanted

if TYPE_CHECKING:
    from paceline_hosts.membership.membership import Membership

_ANSWER_S = 5.0  # a leader that does not answer within this is busy with something else, or was lost
_COLLECT_S = 20.0  # collecting takes up to 2 s, and 10 s more where py-spy is installed
_POLL_S = 0.02
# The most characters for the stacks of a host. In a message each has up to six bytes, and launchers accept 4 MB.
LONGEST = 1 << 19


class StackExchange:
    """One launcher's part in the exchange of stacks.

    Args:
        membership: the membership of this launcher.
        pause: waits for some seconds; messages of other nodes are served meanwhile.
    """

    def __init__(self, membership: Membership, pause: Callable[[float], object]) -> None:
        self._membership = membership
        self._pause = pause
        # The number of the last request of this launcher. Late answers to earlier requests are dropped.
        self._number = 0
        self._answers: dict[str, StacksCollected] = {}  # to that request, by the id of the member
        self._asked: list[str] = []  # headlines of the reports that members want
        self._wanted: StacksWanted | None = None  # the leader's request that this launcher has not answered

    def wanted(self) -> str:
        """Returns the headline of the report for which the leader wants the stacks of this host; "" if it wants none."""
        self._take()
        return "" if self._wanted is None else self._wanted.headline

    def asked(self) -> str:
        """Returns the headline of the next report that a member wants, and forgets it; "" if none is wanted."""
        self._take()
        return self._asked.pop(0) if self._asked else ""

    def answer(self, places: Sequence[RankPlace]) -> None:
        """Sends the leader where these ranks are, if it wants to know. Stacks that are too long lose their end."""
        if self._wanted is None:
            return
        most = LONGEST // max(len(places), 1)
        sent = []
        for place in places:
            stacks = place.stacks
            if len(stacks) > most:
                stacks = f"{stacks[:most]}\n(cut off here: it was too long to be sent)"
            sent.append(replace(place, stacks=stacks, host=self._membership.state.me.host))
        self._membership.send_to_leader(StacksCollected(self._wanted.number, tuple(sent)))
        self._wanted = None

    def gather(self, headline: str, own: Callable[[], list[RankPlace]]) -> GatheredPlaces:
        """Asks the leader for a report; or collects the places of all ranks, if this launcher leads or the leader is silent.

        Args:
            headline: what the report is about.
            own: collects the places of the ranks of this host.
        """
        notes = []
        if isinstance(self._membership.role, Following):
            leader = self._membership.state.name_of(self._membership.leader_id)
            if self._is_reported_by_leader(headline):
                places = own()
                self.answer(places)
                return GatheredPlaces(places, reporter=leader)
            notes.append(f"{leader} did not answer; the ranks of other hosts are missing here")
        asked = self._ask_members(headline)
        # All hosts collect at the same time, so that one report shows one moment.
        places = own()
        deadline = time.monotonic() + _COLLECT_S
        self._take()
        while self._awaited(asked) and time.monotonic() < deadline:
            self._pause(_POLL_S)
            self._take()
        if self._answers:
            # Host names are only shown if there are several hosts.
            places = [replace(place, host=self._membership.state.me.host) for place in places]
        for answer in self._answers.values():
            places += answer.places
        for member_id in sorted(asked - self._answers.keys()):
            name = self._membership.state.name_of(member_id)
            notes.append(f"{name} has sent no stacks within {_COLLECT_S:g} s; its ranks are missing here")
        # Several members may ask for a report of the same event. Their requests arrived before their answers, and this report
        # serves them all.
        self._asked.clear()
        return GatheredPlaces(places, notes)

    def _is_reported_by_leader(self, headline: str) -> bool:
        """Asks the leader for a report of all ranks; returns whether it wants the stacks of this host for that."""
        self._membership.send_to_leader(StacksAsked(headline))
        deadline = time.monotonic() + _ANSWER_S
        while not self.wanted() and isinstance(self._membership.role, Following) and time.monotonic() < deadline:
            self._pause(_POLL_S)
        return self._wanted is not None

    def _ask_members(self, headline: str) -> set[str]:
        """Asks all members for their stacks; returns the ids of those that were asked."""
        self._take()
        self._number += 1
        self._answers.clear()
        asked = set[str]()
        leadership = self._membership.role
        if not isinstance(leadership, Leadership):
            return asked
        for member_id in leadership.members:
            # A member that has reported the end of its processes has no stacks, and does not look for requests any more.
            if member_id in self._membership.peers.connection_of and member_id not in leadership.reports:
                self._membership.peers.send(member_id, StacksWanted(self._number, headline))
                asked.add(member_id)
        return asked

    def _awaited(self, asked: set[str]) -> set[str]:
        """Returns the members that will still answer: those not lost, and whose processes have not ended meanwhile."""
        role = self._membership.role
        ended = role.reports.keys() if isinstance(role, Leadership) else set()
        return (asked & self._membership.peers.connection_of.keys()) - self._answers.keys() - ended

    def _take(self) -> None:
        messages = self._membership.stack_messages
        while messages:
            member_id, message = messages.pop(0)
            if isinstance(message, StacksAsked):
                self._asked.append(message.headline)
            elif isinstance(message, StacksWanted):
                self._wanted = message
            elif message.number == self._number:
                self._answers[member_id] = message
