"""What all launchers of a run agree on: the `Rules`, why a round ends early (`Cause`), and who may go on without the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal


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
    def common(self) -> tuple[int, int, int, str, str]:
        """The values that must be the same on all launchers."""
        return self.least, self.most, self.max_restarts, self.run, self.store


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
