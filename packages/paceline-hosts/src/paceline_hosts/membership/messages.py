"""The messages between launchers: one frozen dataclass for each, and the functions that encode and decode them.

a launcher that joins   Join | Probe | Announce   ->
                                                  <-  Joined | NoLeader | Redirect | Refused     to a Join
                                                  <-  Status                                     to a Probe or an Announce
a member to its leader  ProcessesEnded | Accept | Decline | Draining | Leave
the leader to a member  Proposal | Commit | StopProcesses | RunEnded | SwitchRun | Leave | Expelled
both                    Heartbeat | HeartbeatAck

Some decide nothing about a run, and only tell what goes on in it:
a member to its leader  JournalParts of a watched run; StacksAsked | StacksCollected
the leader to a member  JournalAnswer; StacksWanted
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any, NoReturn, get_args

from paceline.base.errors import Problem
from paceline.base.json_fields import Between, read
from paceline.launch.rounds import Count, End, Member, Name, Number, Place, Report, Round, StopMode
from paceline.world.stacks.parse import RankPlace
from paceline_hosts.forwarding import Answer, FilePart

Text = Annotated[str, Between(0, 2000)]


@dataclass(frozen=True)
class Join:
    """A launcher asks to join: who it is, its `Rules.common`, and the number of the latest round that it knows."""

    member: Member
    rules: tuple[Count, Count, Number, Name, Name]
    round: Number


@dataclass(frozen=True)
class Probe:
    """Asks which launcher listens at a place."""


@dataclass(frozen=True)
class Announce:
    """A leader asks who listens at a place of `--main-address`. Names its own place, its run, its id and when the run began."""

    place: Place
    run: Name
    id: Name
    founded_at: float


@dataclass(frozen=True)
class Status:
    """The answer to `Probe` and `Announce`: who answers, its round, whether it leads, and when its run began."""

    member_id: Name
    round: Number
    leads: bool
    founded_at: float


@dataclass(frozen=True)
class Joined:
    """The answer of a leader to `Join`, with the number of its latest round.

    A launcher that is not a member yet waits for the next round with room for it.
    """

    leader: Member
    round: Number
    is_member: bool


@dataclass(frozen=True)
class NoLeader:
    """The launcher that answers has no leader either; `round` is the latest round that it knows."""

    round: Number
    member_id: Name


@dataclass(frozen=True)
class Redirect:
    """The leader is at another place."""

    place: Place
    member_id: Name = ""


@dataclass(frozen=True)
class Refused:
    """The caller cannot take part."""

    problem: Problem


@dataclass(frozen=True)
class Expelled:
    """The sender counts the receiver as lost."""


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat, which is answered at once; `number` counts the heartbeats of the sender."""

    number: Number


@dataclass(frozen=True)
class HeartbeatAck:
    """The answer to a heartbeat, with its number."""

    number: Number


@dataclass(frozen=True)
class ProcessesEnded:
    """All processes of a member have ended."""

    report: Report


@dataclass(frozen=True)
class Accept:
    """A member accepts the proposal for a round."""

    round: Number


@dataclass(frozen=True)
class Decline:
    """A member declines a proposal, because it knows configurations that the leader must count first."""

    round: Number
    configurations: tuple[tuple[Name, ...], ...]


@dataclass(frozen=True)
class Draining:
    """A member was asked to end."""

    how: StopMode
    why: str


@dataclass(frozen=True)
class Leave:
    """A launcher ends as planned."""

    why: str


@dataclass(frozen=True)
class Proposal:
    """The members of the next round, and the configurations of which a quorum is needed."""

    round: Round
    configurations: tuple[tuple[Name, ...], ...]

    @cached_property
    def encoded(self) -> bytes:
        """The message as `encode` returns it, encoded once.

        It names all members and is sent to all of them. Encoding takes 6 ms at 512 hosts and 25 ms at 2,048 hosts: once for
        each member would keep the leader from its heartbeats for 50 s.
        """
        return _line(self)


@dataclass(frozen=True)
class Commit:
    """A round begins."""

    round: Number
    reason: str


@dataclass(frozen=True)
class StopProcesses:
    """All processes are to be ended."""

    how: StopMode
    why: str


@dataclass(frozen=True)
class RunEnded:
    """The run has ended, for all launchers."""

    end: End


@dataclass(frozen=True)
class SwitchRun:
    """All launchers of this run join the run whose leader is at this place."""

    place: Place


@dataclass(frozen=True)
class JournalParts:
    """What a member has written of a watched run. Some of its files may be larger than a message.

    Attributes:
        parts: of the files.
        is_final: whether this launcher ends, and will send no more.
    """

    parts: tuple[FilePart, ...]
    is_final: bool


@dataclass(frozen=True)
class JournalAnswer:
    """What the member is to do now: as of `JournalCopies.add`."""

    answer: Answer


@dataclass(frozen=True)
class StacksAsked:
    """Somebody wants to see where all ranks are; `headline` says why."""

    headline: Text


@dataclass(frozen=True)
class StacksWanted:
    """A member is to send the stacks of its ranks for a report; `number` counts these requests of the leader."""

    number: Number
    headline: Text


@dataclass(frozen=True)
class StacksCollected:
    """The stacks of a member's ranks, for the request with this number."""

    number: Number
    places: tuple[RankPlace, ...]


JournalMessage = JournalParts | JournalAnswer
StackMessage = StacksAsked | StacksWanted | StacksCollected

Message = (
    Join | Probe | Announce | Status | Joined | NoLeader | Redirect | Refused | Expelled | Heartbeat | HeartbeatAck
    | ProcessesEnded | Accept | Decline | Draining | Leave | Proposal | Commit | StopProcesses | RunEnded | SwitchRun
    | JournalParts | JournalAnswer | StacksAsked | StacksWanted | StacksCollected
)  # fmt: skip
_KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """A message as one line of JSON."""
    return message.encoded if isinstance(message, Proposal) else _line(message)


def _line(message: Message) -> bytes:
    return json.dumps({"kind": type(message).__name__.lower(), **asdict(message)}).encode()


def decode(line: bytes) -> Message:
    """Returns the message of a line.

    Raises:
        ValueError: the line is not a valid message.
    """
    try:
        content = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    kind = content.pop("kind", None) if isinstance(content, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError("there is no message of that kind")
    message: Any = read(_KINDS[kind], content, kind)
    return message  # type: ignore[no-any-return]


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
