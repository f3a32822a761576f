"""`JournalExchange`: what launchers send each other of a watched run, where hosts do not share the folder of its journal.

    a member   once a second what its files have that is new  -- JournalParts -->   the leader writes it into copies
               the next, once there is an answer              <-- JournalAnswer --

So the host that leads has all ranks, and its page shows them. A member has one message under way, whatever a slow network
or a leader that is busy does. Where another launcher begins to lead, all is sent again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.launch.membership.messages import JournalAnswer, JournalParts
from paceline.watch.forwarding import Answer, FilePart, JournalCopies, JournalSender, mark, unmark

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.launch.membership.membership import Membership

_PERIOD_S = 1.0
_MOST_AT_ONCE = 32  # messages of `send_rest`: 2 MB, which is more than a second's lines of a host by far
_LAST_S = 2.0  # how long a leader waits at its end for the others' last lines


class JournalExchange:
    """One launcher's part.

    Args:
        membership: of this launcher.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._sender: JournalSender | None = None
        self._copies: JournalCopies | None = None
        self._leader_id = ""  # whom the sender sends to
        self._awaits_answer = False
        self._is_wanted = True  # by that leader
        self._next_at = 0.0
        self._unfinished: set[str] = set()  # members that have sent something, and will send more

    def open(self, folder: Path) -> None:
        """This launcher records into a folder from now on."""
        if self._sender is None:
            self._sender = JournalSender(folder)
            self._copies = JournalCopies(folder)

    def poll(self) -> None:
        """Does what is due; to be called often."""
        self.take()
        sender = self._sender
        if sender is None or not self._has_leader(sender) or self._awaits_answer:
            return
        now = time.monotonic()
        if now < self._next_at:
            return
        parts = self._next_parts(sender)
        self._next_at = now + _PERIOD_S
        if parts:
            self._send(JournalParts(tuple(parts), is_final=False))
            self._awaits_answer = True
            if not parts[-1].is_last:
                self._next_at = now  # there is more, as soon as this has arrived

    def send_rest(self, *, is_final: bool) -> None:
        """Sends what is left, without waiting for answers: the processes of this host, or this launcher, have ended."""
        sender = self._sender
        self.take()
        if sender is None or not self._has_leader(sender):
            return
        for _ in range(_MOST_AT_ONCE):
            parts = self._next_parts(sender)
            if not parts:
                break
            self._send(JournalParts(tuple(parts), is_final=False))
            self._awaits_answer = True
        if is_final:
            self._send(JournalParts((), is_final=True))
            unmark(sender.folder, self._membership.me.id)
            self._sender = None

    def await_last(self, pause: Callable[[float], object]) -> None:
        """Waits a moment for the last lines of members that do not share the folder, where the run has ended for all.

        Args:
            pause: waits, and does meanwhile what else must go on.
        """
        self.take()
        if self._membership.end is None:
            return
        deadline = time.monotonic() + _LAST_S
        connected = self._membership.peers.connection_of
        while self._unfinished & connected.keys() and time.monotonic() < deadline:
            pause(0.05)
            self.take()

    def take(self) -> None:
        """Takes what the others have sent."""
        while self._membership.journal_messages:
            member_id, message = self._membership.journal_messages.pop(0)
            if isinstance(message, JournalParts):
                self._take_parts(member_id, message)
            elif member_id == self._leader_id:
                self._take_answer(message)

    def _next_parts(self, sender: JournalSender) -> list[FilePart]:
        try:
            if not sender.has_begun:
                mark(sender.folder, self._membership.me.id)
            return sender.parts()
        except OSError as error:  # the run goes on without its journal
            text = (
                f"could not read {error.filename}: {error.strerror}; the page on the first host lacks this host's ranks"
            )
            print(f"paceline: {text}", file=sys.stderr, flush=True)
            self._sender = None
            return []

    def _take_parts(self, member_id: str, message: JournalParts) -> None:
        answer: Answer = "stop"  # where this launcher records nothing
        if self._copies is not None:
            try:
                answer = self._copies.add(member_id, message.parts)
            except OSError as error:
                text = f"could not write {error.filename}: {error.strerror}; ranks of other hosts are not recorded here"
                print(f"paceline: {text}", file=sys.stderr, flush=True)
                self._copies = None
        if message.is_final or answer == "stop":
            self._unfinished.discard(member_id)
        else:
            self._unfinished.add(member_id)
        if not message.is_final:
            self._membership.peers.send(member_id, JournalAnswer(answer))

    def _take_answer(self, message: JournalAnswer) -> None:
        self._awaits_answer = False
        if self._sender is None:
            return
        unmark(self._sender.folder, self._membership.me.id)  # the leader has looked for it
        if message.answer == "again":
            self._sender.begin()
        self._is_wanted = message.answer != "stop"

    def _has_leader(self, sender: JournalSender) -> bool:
        """Whether there is a leader that wants what this launcher has; a new one gets everything."""
        leader_id = self._membership.leader_id
        if leader_id != self._leader_id:
            self._leader_id = leader_id
            self._awaits_answer = False
            self._is_wanted = True
            self._unfinished.clear()
            sender.begin()
        return bool(leader_id) and self._is_wanted

    def _send(self, message: JournalParts) -> None:
        if self._membership.following is not None:
            self._membership.following.send(message)
