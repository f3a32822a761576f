"""The driver's end of the conversation with one host: calls to its actor, answers and output from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline_hosts.remote.channels import Conversation, line_of

_RECEIVE_S = 5.0  # how long an actor may wait for output before it answers that there was none
_REASON = 300  # characters of what Ray says


class RayHost(Conversation):
    """One host, as long as its actor lives.

    Attributes:
        node: the number of the host.
        actor: Ray's handle of the actor.
        pending: the call that the actor will answer next; None if there is none.
        result: the answer to the last call that did not ask for output.
        facts: what `NodeActor.facts` returned; None until the host is placed.
        place: the address and port where its launcher will listen.
        problems: why the host cannot take part.
        ready: whether the host is prepared and can begin.
        running: whether it was told to begin, and has not ended.
        code: the exit code of its launcher; None while it runs.
    """

    def __init__(self, node: int, actor: Any) -> None:
        super().__init__(f"node{node}")
        self.node = node
        self.actor = actor
        self.pending: Any = None
        self.result: Any = None
        self.facts: Mapping[str, Any] | None = None
        self.place: tuple[str, int] | None = None
        self.problems: list[str] = []
        self.ready = self.running = False
        self.code: int | None = None
        self._receives = False
        self._taken = 0

    @property
    def shown(self) -> str:
        """What to call it in messages."""
        return f"{self.host} ({self.facts['address']})" if self.facts is not None else self.host

    def call(self, pending: Any) -> Iterator[None]:
        """Yields until a call is answered; the answer is in `result` then."""
        self.pending = pending
        self.result = None
        while self.pending is not None and not self.problems:
            yield

    def ask(self, message: Mapping[str, Any]) -> Iterator[None]:
        """Sends a message to the agent and yields until the answer has arrived, which is in `result` then."""
        self.send(message)
        while not self.answers and not self.problems:
            if self.code is not None:
                # The end of what the agent printed tells most: it is the message of its exception, if there was one.
                words = " ".join(self.output_before.split()[-40:])
                self.problems.append(f"its launcher ended with exit code {self.code}: {words or 'nothing was said'}")
                return
            yield
        self.result = self.answers.pop(0) if self.answers else None

    def send(self, message: Mapping[str, Any] | None) -> None:
        """Sends a message; None sends an empty line, which tells the agent that the driver is alive."""
        self.actor.send.remote(line_of(message))

    def begin_to_receive(self) -> None:
        """Asks for output from now on; each answer is followed by the next request (`take`)."""
        self._receives = True
        self._ask_for_output()

    def _ask_for_output(self) -> None:
        self.pending = self.actor.receive.remote(self._taken, _RECEIVE_S)

    def take(self, answer: Any) -> None:
        """Takes in the answer to the pending call; `None` if it was lost on the way."""
        self.pending = None
        if not self._receives:
            self.result = answer
            return
        # After a lost answer `_taken` is unchanged, so the next request asks for the same output again.
        chunks, self.code = answer if answer is not None else ((), None)
        for stream, data in chunks:
            self.receive(stream, data)
        self._taken += len(chunks)
        if self.code is None:
            self._ask_for_output()
        else:
            # An empty piece tells both streams that they have ended, so that an unfinished line is shown.
            for stream in (1, 2):
                self.receive(stream, b"")


def reason(error: Exception) -> str:
    """Returns Ray's message about a lost actor in one line."""
    text = " ".join(str(error).split())
    if "No module named 'paceline" in text:
        return "paceline is not installed for Python there, or is an older one"
    return text[:_REASON]
