"""What a collective that failed in the backend means: which rank has left, or that none came in time.

The backend's own words ("Connection closed by peer [127.0.0.1]:33717") name an address of a rank that may be innocent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.base.connections import closed, late
from paceline.base.errors import CollectiveError, PacelineError
from paceline.world import rendezvous
from paceline.world.departures import Departure, departures
from paceline.world.hangs import debug

_SAME_CALLS = "every rank must make the same calls, as often"
_MOST = 160  # characters of the backend's own words
_WORD_S = 0.5  # how long a rank waits to learn who has left: the word and the closed connection travel apart
_POLL_S = 0.02


def communicate(operation: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls a collective of torch.distributed, whose errors name an address at best; gives what it gives.

    Raises:
        CollectiveError: `collective-failed`.
    """
    try:
        return call(*arguments, **keywords)
    except RuntimeError as error:
        explanation = explain(operation, error)
        if explanation is None:
            raise
        raise explanation from error


def explain(operation: str, error: BaseException) -> CollectiveError | None:
    """The error to raise in place of `error`; None where that is no error of the connection between ranks."""
    text = str(error)
    if isinstance(error, PacelineError) or not dist.is_initialized() or not (closed(text) or late(text)):
        return None
    words = re.sub(r"^\[\S+:\d+\] ", "", text.strip().splitlines()[0])  # the place in the backend's own source
    message = f"{dist.get_backend()} says: {words[:_MOST]}"
    if not closed(text):
        return CollectiveError(
            "collective-failed",
            f"{operation} did not end in time: at least one rank did not come.",
            why=[message, "the limit is timeout_s (--timeout-s, PACELINE_TIMEOUT_S)"],
            fix=f"{_SAME_CALLS}{debug.suggestion()}",
        )
    left = _departures()
    what = f"{operation} failed, as another rank has ended."
    why = "it left no word of why: it was killed, or called os._exit"
    if left:
        what = f"{operation} failed, as rank {left[0].rank} has left."
        why = f"{left[0]}; it was the first to leave"
    elif not rendezvous.store_answers():
        why = "the store, which rank 0 (or the launcher's agent) keeps, has ended too"
    return CollectiveError(
        "collective-failed",
        what,
        why=[why, message],
        fix=f"look at what it ran last: {_SAME_CALLS}{debug.suggestion()}",
    )


def _departures() -> list[Departure]:
    """The ranks that are known to have left; waits a moment for the word of the first."""
    rank = dist.get_rank()
    until = time.monotonic() + _WORD_S
    left: list[Departure] = []
    time.sleep(_POLL_S)  # a process that dies closes its connections one by one, that of the store among them
    try:
        while not left and time.monotonic() < until and rendezvous.store_answers():
            everyone = departures(rendezvous.store(), dist.get_world_size())
            left = [departure for departure in everyone if departure.rank != rank]
            time.sleep(_POLL_S)
    except RuntimeError:  # the store has ended, with rank 0 or the launcher's agent: nobody can say more
        return left
    return left
