"""What launchers say of a run: a `Round` is one start of all processes, on its `Member`s, one launcher each.

A `Report` says how the processes of one launcher ended, and `End` how the run ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from paceline.base.errors import Problem
from paceline.base.json_fields import Between

# Messages between launchers are validated by these types, so the types carry the bounds of their values.
Name = Annotated[str, Between(0, 255)]  # of a host, an address, a launcher, a run
Port = Annotated[int, Between(0, 65_535)]
Count = Annotated[int, Between(1, 100_000)]  # of processes, of nodes
Number = Annotated[int, Between(0, 1_000_000_000)]  # of a round; 0 for none
Place = tuple[Name, Port]  # address and port of a launcher
StopMode = Literal["save", "end"]  # whether processes may save before they end


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

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The ids of the members."""
        return tuple(member.id for member in self.members)

    @cached_property
    def node_of(self) -> dict[str, int]:
        """The number that each member has in this round, by its id."""
        return {member_id: node for node, member_id in enumerate(self.ids)}


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
