"""The data of membership.

`Member` is one launcher, `Rules` are the settings that all launchers share, a `Round` is one start of all processes, a `Report`
says how the processes of one launcher ended, and `End` how the run ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal

from paceline.base.errors import Problem
from paceline.base.json_fields import Between

# Messages are validated by these types (`messages.py`), so the types carry the bounds of their values.
Name = Annotated[str, Between(0, 255)]  # of a host, an address, a launcher, a run
Port = Annotated[int, Between(0, 65_535)]
Count = Annotated[int, Between(1, 100_000)]  # of processes, of nodes
Number = Annotated[int, Between(0, 1_000_000_000)]  # of a round; 0 for none
Place = tuple[Name, Port]  # address and port of a launcher


@dataclass(frozen=True)
class Member:
    """One launcher.

    Attributes:
        id: unique for each launcher process, also for one that is started again on the same host.
        host: the name of its host.
        procs: how many processes it starts.
        address, port: where the others reach it.
        node: the number that the user gave it; -1 where the order of joining decides.
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

    @property
    def shown(self) -> str:
        """What to call it in messages for the user, outside of a round."""
        return f"node {self.node} ({self.host})" if self.node >= 0 else self.host


@dataclass(frozen=True)
class Rules:
    """The settings that must be the same on all launchers of a run, and the timeouts.

    Attributes:
        least, most: the fewest and the most nodes of a round.
        max_restarts: how many failures may be followed by another round.
        run: the name of the run. Launchers of runs with other names are turned away.
        store: the store that all use; "" for none.
        heartbeat_s: seconds between two heartbeats.
        silence_limit_s: a launcher that has sent nothing for so long counts as lost.
        join_timeout_s: how long to wait for enough nodes.
        last_call_timeout_s: how long to wait for more nodes once there are enough.
        grace_s: how long processes may take to save and end.
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
        """Whether the number of nodes is fixed, so that no round begins with fewer."""
        return self.least == self.most

    @property
    def common(self) -> tuple[int, int, int, str] | tuple[int, int, int, str, str]:
        """The values that must be the same on all launchers; four of them without a store, as in older versions."""
        common = (self.least, self.most, self.max_restarts, self.run)
        return (*common, self.store) if self.store else common


@dataclass(frozen=True)
class Round:
    """One start of all processes.

    Attributes:
        number: the number of the round, from 1. A round that was proposed and never began has a number too.
        restarts: how many failures came before it.
        members: the launchers that take part, in the order of their ranks.
        store_port: where rank 0 listens, on the host of the first member.
        reason: why the previous round ended; "" for the first round.
        founded_at: when the run began (seconds since the epoch).
    """

    number: int
    restarts: int
    members: tuple[Member, ...]
    store_port: Port = 0
    reason: str = ""
    founded_at: float = 0.0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the members."""
        return tuple(member.id for member in self.members)

    def index_of(self, member_id: str) -> int:
        """Returns the number that a member has in this round."""
        return self.ids.index(member_id)


@dataclass(frozen=True)
class Report:
    """How the processes of one launcher ended.

    Attributes:
        kind: "new" before the first round; "done", "preempted" (they have saved), "failed", or "stopped" by the launcher.
        what: the first failure, in one sentence.
        at: the time of that failure (seconds since the epoch).
        store_port: a free port of this host, for rank 0 of the next round.
        again: whether a restart can help. It cannot after an anomaly that stops the run.
    """

    kind: Literal["new", "done", "preempted", "failed", "stopped"]
    what: str = ""
    at: float = 0.0
    store_port: Port = 0
    again: bool = True


LossKind = Literal["lost", "left"]  # whether a launcher disappeared, or ended as it was asked to


@dataclass(frozen=True)
class Cause:
    """Why a round ends before its processes do.

    Attributes:
        kind: "failed", "lost", "left" or "grow" (more nodes join); "" where the processes ended by themselves.
        why: one sentence.
        member_id: the member that caused it.
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
    """How the run ends for a launcher.

    Attributes:
        code: the exit code.
        why: what went wrong, in one sentence; "" for nothing.
        member_id: the member that failed first.
        error: the error to raise, where the launch itself failed.
    """

    code: int
    why: str = ""
    member_id: str = ""
    error: Problem | None = None


def newest_members_first(configurations: Sequence[Sequence[str]]) -> list[str]:
    """Returns the members of the last rounds, those of the newest configuration first, each once."""
    newest_first = chain.from_iterable(reversed(configurations))
    return list(dict.fromkeys(newest_first))


def has_quorum(
    present: Collection[str],
    configurations: Sequence[Sequence[str]],
    dead: Collection[str],
    has_vote: bool | None = None,
) -> bool:
    """Returns whether the members that are present may go on without the others, which may be alive and unreachable.

    Members that are known to be dead are left out of each configuration. Of those that remain, more than half must be present,
    or exactly half including the first one. Two sets of members with nobody in common can then never both go on: each would
    need at least half, and only one of them has the first member. With a store, the vote of the store takes the place of the
    first member.

    Args:
        present: the members that are present.
        configurations: sets of members; a quorum of each is needed.
        dead: the members that are known to be dead.
        has_vote: whether those present have the vote of the store; None where there is no store.
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
