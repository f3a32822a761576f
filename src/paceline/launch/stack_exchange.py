"""`StackExchange`: the stacks of the ranks of all hosts, brought together by the launcher that leads.

a member   somebody asks here, or its ranks are stuck   -- StacksAsked -->       the leader
all        they collect the stacks of their ranks       <-- StacksWanted --
           at most 1 MB a host                          -- StacksCollected -->   one report of all
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.launch.membership.messages import StacksAsked, StacksCollected, StacksWanted
from paceline.world.stacks.groups import ProcessStacks
from paceline.world.stacks.transfer import received, to_send

if TYPE_CHECKING:
    from paceline.launch.membership.membership import Membership

_ANSWER_S = 5.0  # a leader that does not answer within this is busy with something else, or was lost
_COLLECT_S = 20.0  # collecting takes up to 2 s, and 10 s more where py-spy is installed
_POLL_S = 0.02


class StackExchange:
    """One launcher's part.

    Args:
        membership: of this launcher.
        pause: waits a moment, and does meanwhile what else must go on.
    """

    def __init__(self, membership: Membership, pause: Callable[[float], object]) -> None:
        self._membership = membership
        self._pause = pause
        self._number = 0  # of the request that this launcher has made last
        self._answers: dict[str, StacksCollected] = {}
        self._asked: list[str] = []
        self._wanted: int | None = None  # number of the leader's request

    def asked(self) -> str:
        """What a member wants a report about, of those that were not asked for before; "" for nothing."""
        self._take()
        return self._asked.pop(0) if self._asked else ""

    @property
    def is_wanted(self) -> bool:
        """Whether the leader wants the stacks of this host."""
        self._take()
        return self._wanted is not None

    @property
    def follows(self) -> bool:
        """Whether another launcher leads."""
        return self._membership.following is not None

    @property
    def leader(self) -> str:
        """What to call the launcher that leads."""
        return self._membership.name_of(self._membership.leader_id)

    def ask_leader(self, headline: str) -> bool:
        """Asks the leader for a report of all ranks; returns whether it wants the stacks of this host for that.

        Args:
            headline: what the report is about.
        """
        self._send(StacksAsked(headline))
        deadline = time.monotonic() + _ANSWER_S
        while not self.is_wanted and self.follows and time.monotonic() < deadline:
            self._pause(_POLL_S)
        return self._wanted is not None

    def answer(self, processes: Sequence[ProcessStacks]) -> None:
        """Sends the leader the stacks, if it wants any."""
        if self._wanted is not None:
            host = self._membership.me.host
            self._send(StacksCollected(self._wanted, to_send(processes, host)))
        self._wanted = None

    def begin(self) -> set[str]:
        """Asks all members for their stacks; returns who was asked."""
        self._take()
        self._number += 1
        self._answers.clear()
        asked = set[str]()
        leadership = self._membership.leadership
        if leadership is None:
            return asked
        for member_id in leadership.members:
            # Where all processes have ended, nobody looks for what is wanted of them.
            if member_id in self._membership.peers.connection_of and member_id not in leadership.reports:
                self._membership.peers.send(member_id, StacksWanted(self._number))
                asked.add(member_id)
        return asked

    def gather(self, asked: set[str]) -> tuple[list[ProcessStacks], list[str]]:
        """Waits for the stacks of members; returns them, and a line for each member that has not sent any.

        Args:
            asked: as `begin` returned it.
        """
        deadline = time.monotonic() + _COLLECT_S
        while time.monotonic() < deadline:
            self._take()
            if not self._awaited(asked):
                break
            self._pause(_POLL_S)
        processes: list[ProcessStacks] = []
        for answer in self._answers.values():
            processes += received(answer.processes)
        notes = []
        for member_id in sorted(asked - self._answers.keys()):
            name = self._membership.name_of(member_id)
            notes.append(f"{name} has sent no stacks within {_COLLECT_S:g} s; its ranks are missing here")
        # Who has answered has sent its own wishes before: this is the report that they are about.
        self._asked.clear()
        return processes, notes

    def _awaited(self, asked: set[str]) -> set[str]:
        """Who will answer yet: not who was lost, nor whose processes have ended meanwhile."""
        leadership = self._membership.leadership
        ended = set() if leadership is None else leadership.reports.keys()
        return (asked & self._membership.peers.connection_of.keys()) - self._answers.keys() - ended

    def _take(self) -> None:
        messages = self._membership.stack_messages
        while messages:
            member_id, message = messages.pop(0)
            if isinstance(message, StacksAsked):
                self._asked.append(message.headline)
            elif isinstance(message, StacksWanted):
                self._wanted = message.number
            elif message.number == self._number:
                self._answers[member_id] = message

    def _send(self, message: StacksAsked | StacksCollected) -> None:
        if self._membership.following is not None:
            self._membership.following.send(message)
