"""What launchers say to each other: one frozen dataclass a message, and the one place where such are read.

a launcher that calls   Hello | Probe | Home      ->
                                                  <-  Joined | Wait | Later | Refused        to a Hello
                                                  <-  Here                                   to a Probe or a Home
a member to its leader  Rest | Ready | Leaving | Bye | Heartbeat | HeartbeatAck
the leader to a member  Proposal | Go | Halt | Over | Move | Bye | Expelled | Heartbeat | HeartbeatAck
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NoReturn, get_args

from paceline.base.errors import Problem
from paceline.launch.rounds import Count, End, Member, Name, Place, Report, Round
from paceline.launch.typed import Between, read

Number = Annotated[int, Between(0, 1_000_000_000)]  # of a round; 0 for none
How = Literal["save", "end"]  # how processes are ended: they may save first, or not


@dataclass(frozen=True)
class Hello:
    """A launcher that seeks a run: who it is, what it was told, and the last decision that it knows of."""

    member: Member
    rules: tuple[Count, Count, Number, Name]
    round: Number


@dataclass(frozen=True)
class Probe:
    """Who is there?"""


@dataclass(frozen=True)
class Home:
    """A run that began through this place asks who is here now: its leader's place, name, member id and birth."""

    place: Place
    run: Name
    id: Name
    born: float


@dataclass(frozen=True)
class Here:
    """Who answers, in which round, whether it leads, and when its run was founded."""

    here: Name
    round: Number
    leads: bool
    born: float


@dataclass(frozen=True)
class Joined:
    """The caller has found its leader, whose last decision has this number."""

    leader: Member
    round: Number


@dataclass(frozen=True)
class Wait:
    """The one who answers seeks a run too; `round` is the last decision that it knows of."""

    round: Number
    here: Name


@dataclass(frozen=True)
class Later:
    """The leader is at another place."""

    place: Place
    here: Name = ""


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
class Rest:
    """All processes of a member have ended."""

    report: Report


@dataclass(frozen=True)
class Ready:
    """A member knows who takes part in a round."""

    round: Number


@dataclass(frozen=True)
class Leaving:
    """A member was asked to end."""

    how: How
    why: str


@dataclass(frozen=True)
class Bye:
    """A launcher ends now, as planned."""

    why: str


@dataclass(frozen=True)
class Proposal:
    """Who is to take part in a round, and the sets of members of which enough must go on together."""

    round: Round
    views: tuple[tuple[Name, ...], ...]


@dataclass(frozen=True)
class Go:
    """A round begins."""

    round: Number
    reason: str


@dataclass(frozen=True)
class Halt:
    """All processes are to be ended."""

    how: How
    why: str


@dataclass(frozen=True)
class Over:
    """The end of all."""

    end: End


@dataclass(frozen=True)
class Move:
    """All are to join the run whose leader is at this place."""

    place: Place


Message = (
    Hello | Probe | Home | Here | Joined | Wait | Later | Refused | Expelled | Heartbeat | HeartbeatAck
    | Rest | Ready | Leaving | Bye | Proposal | Go | Halt | Over | Move
)  # fmt: skip
_KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """A message as one line of JSON."""
    return json.dumps({"kind": type(message).__name__.lower(), **asdict(message)}).encode()


def decode(line: bytes) -> Message:
    """The message of a line.

    Raises:
        ValueError: it is no message.
    """
    try:
        said = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    kind = said.pop("kind", None) if isinstance(said, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError("there is no message of that kind")
    message: Any = read(_KINDS[kind], said, kind)
    return message  # type: ignore[no-any-return]


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
