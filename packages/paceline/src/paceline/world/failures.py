"""Explains the error of a collective that failed in the backend: which rank has left, or that some did not come in time.

The backend's own message ("Connection closed by peer [127.0.0.1]:33717") names the address of a rank that may not be the
cause.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.base.connections import closed, late
from paceline.base.errors import CollectiveError, PacelineError
from paceline.world import rendezvous
from paceline.world.departures import Departure, departures
from paceline.world.hang_reports import hang_reports, suggestion
from paceline.world.places import frames_of, user_frame
from paceline.world.stacks.parse import position

_SAME_CALLS = "every rank must make the same calls, as often"
_MOST = 160  # characters of the backend's own words
# How long a rank waits to learn who has left: a rank's message in the store may arrive after its connection is closed.
_WORD_S = 0.5
_POLL_S = 0.02


def communicate(operation: str, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls a collective of torch.distributed and returns its result; an error of a connection becomes one that explains it.

    Raises:
        CollectiveError: `collective-failed`.
    """
    try:
        return call(*arguments, **keywords)
    except (RuntimeError, ValueError) as error:
        if not dist.is_initialized():
            raise CollectiveError(
                "collective-failed",
                f"{operation} cannot run: this process has left its group.",
                why="end_training(), or the end of the script, ended the group",
                fix="call end_training() last",
            ) from error
        explanation = explain(operation, error)
        if explanation is None:
            raise
        raise explanation from error


def explain(operation: str, error: BaseException) -> CollectiveError | None:
    """Returns the error to raise in place of `error`; None if `error` is not about the connections between ranks."""
    text = str(error)
    if isinstance(error, PacelineError) or not dist.is_initialized() or not (closed(text) or late(text)):
        return None
    # The message begins with a place in the backend's own source, which says nothing to the user.
    words = re.sub(r"^\[\S+:\d+\] ", "", text.strip().splitlines()[0])
    message = f"{dist.get_backend()} says: {words[:_MOST]}"
    if not closed(text):
        return CollectiveError(
            "collective-failed",
            f"{operation} did not end in time: at least one rank did not come.",
            why=[*_last_report(operation), message, "the limit is timeout_s (--timeout-s, PACELINE_TIMEOUT_S)"],
            fix=f"{_SAME_CALLS}{suggestion()}",
        )
    left = _departures()
    # Where `save_state` gathers something, the script knows `save_state` only.
    place = position(frames_of(sys._getframe()))
    called = place.operation if place is not None and user_frame() else operation
    what = f"{called} failed, as another rank has ended."
    why = "it left no word of why: it was killed, or called os._exit"
    fix = f"look at what it ran last: {_SAME_CALLS}"
    if left is None:
        why = "the store, which rank 0 (or the launcher's agent) keeps, has ended too"
    elif left:
        what = f"{called} failed, as rank {left[0].rank} has left."
        why = f"{left[0]}; it was the first to leave"
        if not left[0].error:
            fix = f"let every rank call {called}, as often (not under `if accelerator.is_main_process:`)"
    return CollectiveError("collective-failed", what, why=[why, message], fix=f"{fix}{suggestion()}")


def _last_report(operation: str) -> list[str]:
    """Returns what each rank did when this wait was reported."""
    reports = hang_reports()
    if reports is None:
        return []
    try:
        return reports.last_report(operation)
    except RuntimeError:
        return []  # the store has ended


def _departures() -> list[Departure] | None:
    """Returns the ranks that are known to have left; waits a moment until the first one is known.

    None if the store has ended.
    """
    rank = dist.get_rank()
    until = time.monotonic() + _WORD_S
    left: list[Departure] = []
    # A process that dies closes its connections one by one, so the store may seem to be there for a moment.
    time.sleep(_POLL_S)
    try:
        while not left and time.monotonic() < until:
            if not rendezvous.store_answers():
                return None
            everyone = departures(rendezvous.store(), dist.get_world_size())
            left = [departure for departure in everyone if departure.rank != rank]
            time.sleep(_POLL_S)
    except RuntimeError:
        return None  # it has ended between the check and the question
    return left
