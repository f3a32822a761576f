"""What launchers say to each other: one frozen dataclass a message, and the one place where such are read.

a launcher that calls   Join | Probe | Announce   ->
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
from typing import Annotated, Any, Literal, NoReturn, get_args

from paceline.base.errors import Problem
from paceline.base.json_fields import Between, read
from paceline.launch.membership.rounds import Count, End, Member, Name, Place, Report, Round
from paceline.watch.forwarding import Answer, FilePart
from paceline.world.stacks.groups import ProcessStacks

Text = Annotated[str, Between(0, 2000)]
Number = Annotated[int, Between(0, 1_000_000_000)]  # of a round; 0 for none
StopMode = Literal["save", "end"]  # how processes are ended: they may save first, or not


@dataclass(frozen=True)
class Join:
    """A launcher that seeks a run: who it is, what it was told, and the last decision that it knows of."""

    member: Member
    rules: tuple[Count, Count, Number, Name] | tuple[Count, Count, Number, Name, Name]  # the last: the store, if any
    round: Number


@dataclass(frozen=True)
class Probe:
    """Who is there?"""


@dataclass(frozen=True)
class Announce:
    """A run that began through this place asks who is here now: its leader's place, name, member id and birth."""

    place: Place
    run: Name
    id: Name
    founded_at: float


@dataclass(frozen=True)
class Status:
    """Who answers, in which round, whether it leads, and when its run was founded."""

    member_id: Name
    round: Number
    leads: bool
    founded_at: float


@dataclass(frozen=True)
class Joined:
    """The caller has found its leader, whose last decision has this number. Who is no member waits for a place: rounds may
    begin without it."""

    leader: Member
    round: Number
    is_member: bool


@dataclass(frozen=True)
class NoLeader:
    """The one who answers seeks a run too; `round` is the last decision that it knows of."""

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
    """The one who says so counts the other as lost."""


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life, which is answered at once; `number` counts those of the sender."""

    number: Number


@dataclass(frozen=True)
class HeartbeatAck:
    """The answer to a heartbeat: its number."""

    number: Number


@dataclass(frozen=True)
class ProcessesEnded:
    """All processes of a member have ended."""

    report: Report


@dataclass(frozen=True)
class Accept:
    """A member knows who takes part in a round."""

    round: Number


@dataclass(frozen=True)
class Decline:
    """A member does not accept a round yet: it knows of sets of members that the leader has not counted."""

    round: Number
    configurations: tuple[tuple[Name, ...], ...]


@dataclass(frozen=True)
class Draining:
    """A member was asked to end."""

    how: StopMode
    why: str


@dataclass(frozen=True)
class Leave:
    """A launcher ends now, as planned."""

    why: str


@dataclass(frozen=True)
class Proposal:
    """Who is to take part in a round, and the sets of members of which enough must go on together."""

    round: Round
    configurations: tuple[tuple[Name, ...], ...]

    @cached_property
    def encoded(self) -> bytes:
        """As `encode` gives it. It names all members and goes to all of them: encoding takes 6 ms at 512 hosts and 25 ms at
        2,048, so that once for each member would keep a leader from its heartbeats for 50 s."""
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
    """The end of all."""

    end: End


@dataclass(frozen=True)
class SwitchRun:
    """All are to join the run whose leader is at this place."""

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
    """A member is to send the stacks of its ranks; `number` counts these requests of the leader."""

    number: Number


@dataclass(frozen=True)
class StacksCollected:
    """The stacks of a member's ranks, for the request with this number."""

    number: Number
    processes: tuple[ProcessStacks, ...]


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
    """The message of a line.

    Raises:
        ValueError: it is no message.
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
