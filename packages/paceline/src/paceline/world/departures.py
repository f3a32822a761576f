"""Which ranks have left the group, in which order, and why: each writes it into the store as it leaves."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.base.connections import LEFT

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store


@dataclass(frozen=True)
class Departure:
    """A rank that has left.

    Attributes:
        rank: which one.
        at: when, in seconds since the epoch, by its own host's clock.
        error: the error with which it ended; "" where its script ended without one.
    """

    rank: int
    at: float
    error: str

    def __str__(self) -> str:
        if self.error:
            return f"rank {self.rank} failed: {self.error}"
        return f"rank {self.rank} has left: {LEFT}"


def announce(store: Store, rank: int, failure: BaseException | None) -> None:
    """Writes down that `rank` leaves.

    Raises:
        RuntimeError: the store has ended, and nobody can read it any more.
    """
    error = "" if failure is None else f"{type(failure).__name__}: {failure}".strip().splitlines()[0]
    store.set(f"departed/{rank}", json.dumps({"at": time.time(), "error": error}))


def departures(store: Store, size: int) -> list[Departure]:
    """Returns the ranks that have left, the first one first.

    Raises:
        RuntimeError: the store has ended.
    """
    left = []
    for rank in range(size):
        key = f"departed/{rank}"
        if store.check([key]):
            left.append(Departure(rank, **json.loads(store.get(key))))
    return sorted(left, key=lambda departure: departure.at)
