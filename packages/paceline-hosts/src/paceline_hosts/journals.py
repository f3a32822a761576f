"""`JournalExchange`: the launchers of a watched run send the leader their journals if hosts do not share its folder.

    a member   sends, once a second, what is new in its files   -- JournalParts -->   the leader writes it into copies
               sends the next part after the answer             <-- JournalAnswer --

The host that leads thus has the journals of all ranks, and its page shows them. A member waits for the answer before it
sends more, so that messages do not pile up where the network is slow or the leader is busy. If another launcher begins to
lead, each member sends it everything from the beginning.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.base.terminal import say
from paceline_hosts.forwarding import Answer, FilePart, JournalCopies, JournalSender, mark, unmark
from paceline_hosts.membership.messages import JournalAnswer, JournalParts

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_hosts.membership.membership import Membership

_PERIOD_S = 1.0
# How many messages `send_rest` sends at most: 2 MB, which is far more than a host writes in a second.
_MOST_AT_ONCE = 32
_LAST_S = 2.0  # how long a leader waits at its end for the others' last lines


class JournalExchange:
    """One launcher's part in the exchange of journals.

    Args:
        membership: the membership of this launcher.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._sender: JournalSender | None = None
        self._copies: JournalCopies | None = None
        self._leader_id = ""  # the launcher to which the sender sends
        self._awaits_answer = False
        self._is_wanted = True  # whether that leader still wants the journal
        self._next_at = 0.0
        self._unfinished: set[str] = set()  # ids of members that have sent something, and will send more

    def open(self, folder: Path) -> None:
        """Tells the exchange that this launcher records into `folder` from now on; later calls change nothing."""
        if self._sender is None:
            self._sender = JournalSender(folder)
            self._copies = JournalCopies(folder)

    def poll(self) -> None:
        """Takes in what has arrived, and sends what is due. The launcher calls it in its loop, several times a second."""
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
            self._membership.send_to_leader(JournalParts(tuple(parts), is_final=False))
            self._awaits_answer = True
            if not parts[-1].is_last:
                self._next_at = now  # there is more, as soon as this has arrived

    def send_rest(self, *, is_final: bool) -> None:
        """Sends what is left, without waiting for answers.

        Args:
            is_final: whether this launcher ends; otherwise only the processes of this host have ended.
        """
        sender = self._sender
        self.take()
        if sender is None or not self._has_leader(sender):
            return
        for _ in range(_MOST_AT_ONCE):
            parts = self._next_parts(sender)
            if not parts:
                break
            self._membership.send_to_leader(JournalParts(tuple(parts), is_final=False))
            self._awaits_answer = True
        if is_final:
            # An empty message says that nothing follows, and ends the wait of the leader in `await_last`.
            self._membership.send_to_leader(JournalParts((), is_final=True))
            unmark(sender.folder, self._membership.state.me.id)
            self._sender = None

    def await_last(self, pause: Callable[[float], object]) -> None:
        """Waits a moment for the last lines of members that do not share the folder, if the run has ended for all nodes.

        Args:
            pause: waits for some seconds; messages of other nodes are served meanwhile.
        """
        self.take()
        if self._membership.state.end is None:
            return  # only this launcher ends; the others go on and will send their lines to another leader
        deadline = time.monotonic() + _LAST_S
        connected = self._membership.peers.connection_of
        while self._unfinished & connected.keys() and time.monotonic() < deadline:
            pause(0.05)
            self.take()

    def take(self) -> None:
        """Takes in the messages that the others have sent."""
        while self._membership.journal_messages:
            member_id, message = self._membership.journal_messages.pop(0)
            if isinstance(message, JournalParts):
                self._take_parts(member_id, message)
            elif member_id == self._leader_id:
                self._take_answer(message)

    def _next_parts(self, sender: JournalSender) -> list[FilePart]:
        try:
            if not sender.has_begun:
                mark(sender.folder, self._membership.state.me.id)
            return sender.parts()
        except OSError as error:
            # A journal that cannot be read must not end the training: the run goes on without it.
            say(
                f"could not read {error.filename}: {error.strerror}; the page on the first host lacks this host's ranks"
            )
            self._sender = None
            return []

    def _take_parts(self, member_id: str, message: JournalParts) -> None:
        answer: Answer = "stop"  # the answer of a launcher that records nothing
        if self._copies is not None:
            try:
                answer = self._copies.add(member_id, message.parts)
            except OSError as error:
                say(f"could not write {error.filename}: {error.strerror}; ranks of other hosts are not recorded here")
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
        unmark(self._sender.folder, self._membership.state.me.id)  # the leader has looked for it
        if message.answer == "again":
            self._sender.begin()
        self._is_wanted = message.answer != "stop"

    def _has_leader(self, sender: JournalSender) -> bool:
        """Returns whether there is a leader that wants the journal of this launcher.

        If the leader has changed, the sender begins again, because the new leader has nothing yet.
        """
        leader_id = self._membership.leader_id
        if leader_id != self._leader_id:
            self._leader_id = leader_id
            self._awaits_answer = False
            self._is_wanted = True
            self._unfinished.clear()
            sender.begin()
        return bool(leader_id) and self._is_wanted
