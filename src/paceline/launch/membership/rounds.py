"""The nouns of membership: one launcher among several (`Member`), what is asked of them all (`Rules`), one start of all
processes (`Round`), how a launcher's processes ended (`Report`) and how everything ends (`End`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal

from paceline.base.errors import Problem
from paceline.base.json_fields import Between

# Launchers read each other's words by these types (`messages.py`): so they carry their bounds.
Name = Annotated[str, Between(0, 255)]  # of a host, an address, a launcher, a run
Port = Annotated[int, Between(0, 65_535)]
Count = Annotated[int, Between(1, 100_000)]  # of processes, of nodes
Place = tuple[Name, Port]  # address and port of a launcher


@dataclass(frozen=True)
class Member:
    """One launcher.

    Attributes:
        id: tells it from every other launcher that ever was, one started again on the same host included.
        host: its host's name.
        procs: how many processes it starts.
        address, port: where the others reach it.
        node: the number that it was given; -1 where it takes the next free place.
    """

    id: Name
    host: Name
    procs: Count
    address: Name = "127.0.0.1"
    port: Port = 0
    node: Annotated[int, Between(-1, 100_000)] = -1

    @property
    def place(self) -> Place:
        """Where the others reach it."""
        return self.address, self.port


@dataclass(frozen=True)
class Rules:
    """What all launchers of a run must have been told alike, and how patient they are.

    Attributes:
        least, most: how many nodes a round has.
        max_restarts: how often a failure may begin another round.
        run: a name that keeps different runs apart.
        store: the store that all use; "" for none.
        heartbeat_s: seconds between two heartbeats.
        silence_limit_s: silence after which a launcher counts as lost.
        join_timeout_s: how long to wait for enough nodes.
        last_call_timeout_s: how long to wait for more, once there are enough.
        grace_s: how long processes may take to save and leave.
    """

    least: int = 1
    most: int = 1
    max_restarts: int = 0
    run: str = "paceline"
    store: str = field(default="", kw_only=True)
    heartbeat_s: float = 1.0
    silence_limit_s: float = 5.0
    join_timeout_s: float = 300.0
    last_call_timeout_s: float = 2.0
    grace_s: float = 30.0

    @property
    def fixed(self) -> bool:
        """Whether the number of nodes is given, so that none can be done without."""
        return self.least == self.most

    @property
    def common(self) -> tuple[int, int, int, str] | tuple[int, int, int, str, str]:
        """What must be the same on all; of runs without a store, messages are as they were before there was one."""
        common = (self.least, self.most, self.max_restarts, self.run)
        return (*common, self.store) if self.store else common


@dataclass(frozen=True)
class Round:
    """All processes, started together once.

    Attributes:
        number: counts the decisions about who takes part, from 1.
        restarts: how many failures came before it.
        members: who takes part, in the order of their ranks.
        store_port: where rank 0 listens, on the first member's host.
        reason: why the round before it ended; "" for the first.
        founded_at: when the run was founded (seconds since the epoch).
    """

    number: int
    restarts: int
    members: tuple[Member, ...]
    store_port: Port = 0
    reason: str = ""
    founded_at: float = 0.0

    @property
    def ids(self) -> tuple[str, ...]:
        """Who takes part."""
        return tuple(member.id for member in self.members)

    def index_of(self, member_id: str) -> int:
        """The number that a member has in this round."""
        return self.ids.index(member_id)

    def name(self, member_id: str) -> str:
        """What to call a member in messages."""
        node = self.index_of(member_id)
        return f"node {node} ({self.members[node].host})"


@dataclass(frozen=True)
class Report:
    """How the processes of one launcher ended.

    Attributes:
        kind: "new" (none has been started), "done", "preempted", "failed" by themselves, or "stopped" by us.
        what: the first failure, in one sentence.
        at: when that was (seconds since the epoch).
        store_port: a port that is free here, for the next round's rank 0.
        again: whether another round could end better; not after an anomaly that stops the run.
    """

    kind: Literal["new", "done", "preempted", "failed", "stopped"]
    what: str = ""
    at: float = 0.0
    store_port: Port = 0
    again: bool = True


LossKind = Literal["lost", "left"]  # how a launcher went: without a word, or as it was asked to


@dataclass(frozen=True)
class Cause:
    """Why a round ends before its processes do.

    Attributes:
        kind: "failed", "lost", "left" or "grow"; "" where the processes ended by themselves.
        why: one sentence.
        member_id: the member that it began with.
        at: when a process failed (seconds since the epoch).
        again: as in `Report`.
    """

    kind: Literal["", "failed", "lost", "left", "grow"] = ""
    why: str = ""
    member_id: str = ""
    at: float = 0.0
    again: bool = True


@dataclass(frozen=True)
class End:
    """The end of a launcher's part.

    Attributes:
        code: exit code.
        why: what went wrong, in one sentence; "" for nothing.
        member_id: the member that failed first.
        error: what is to be raised, where it is an error of the launch.
    """

    code: int
    why: str = ""
    member_id: str = ""
    error: Problem | None = None


def member_name(member_id: str, decided: Round | None, members: Mapping[str, Member]) -> str:
    """What to call a launcher in messages: by its number in the last round, or by the one that it was given."""
    if decided is not None and member_id in decided.ids:
        return decided.name(member_id)
    member = members.get(member_id)
    if member is None:
        return "?"
    return f"node {member.node} ({member.host})" if member.node >= 0 else member.host


def newest_members_first(configurations: Sequence[Sequence[str]]) -> list[str]:
    """The members of the last rounds, those of the newest configuration first, each once."""
    newest_first = chain.from_iterable(reversed(configurations))
    return list(dict.fromkeys(newest_first))


def has_quorum(
    present: Collection[str],
    configurations: Sequence[Sequence[str]],
    dead: Collection[str],
    has_vote: bool | None = None,
) -> bool:
    """Whether those present may go on without the others, who may be there yet out of reach.

    Of each configuration, leaving out who is known to be dead, more than half must be present, or half and its first. Two
    sets of members that have nobody in common can then never both be allowed: each would need at least half of a base
    that holds both, and only one of them has its first. Where there is a store, its vote counts in place of the first.

    Args:
        present: who is there.
        configurations: sets of members; a quorum of each is needed.
        dead: who is known to be dead.
        has_vote: whether the store's vote is theirs; None where there is no store.
    """
    for configuration in configurations:
        base = [member_id for member_id in configuration if member_id not in dead]
        number = sum(member_id in present for member_id in base)
        if 2 * number < len(base):
            return False
        is_tied = bool(base) and 2 * number == len(base)
        breaks_tie = has_vote if has_vote is not None else is_tied and base[0] in present
        if is_tied and not breaks_tie:
            return False
    return True
