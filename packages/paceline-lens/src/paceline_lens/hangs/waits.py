"""Reports of waits: which rank waits where, and for which. Ranks send nothing as long as none of them waits for long.

    after `report_s`  a rank that waits opens a round in the store; the first one writes the report
    the others        see the round at their next look, and answer where they are
    the report        one rank logs it: which ranks are at which line, which do not answer, and which have left

A rank whose backward pass has failed writes that into the store. The other ranks would wait for its gradients until the
timeout, and cannot be interrupted inside gloo. So they end, and print the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.base.json_fields import read
from paceline.base.log import logger
from paceline.base.wording import ranks_text
from paceline.world import rendezvous
from paceline.world.departures import departures
from paceline.world.stacks.parse import RankPlace, position
from paceline_lens.hangs.progress import LOOK_S, Look, Progress
from paceline_lens.hangs.stack_report import grouped, short_report
from paceline_lens.hangs.watcher import Watcher, duty, end_process, running

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_LOOKS = 6  # looks before a report, at least
_MOST_CHECK_S = 5.0  # seconds at most between two looks into the store, whether another rank has opened a round
_ANSWER_S = 2.0  # how long an answer may take, beside the time until the next look
_HOPELESS_S = 5.0  # how long a rank waits, at most, for gradients of a rank whose backward pass has failed
_LAST = "waits/last"  # where the store has the last report
_FAILED = "waits/failed"  # whether any backward pass has failed; and by rank, with which error


def watch(report_s: float, timeout_s: float | None, computes_on_cpu: bool) -> None:
    """Starts to report waits of this process, until it leaves its group. A second call changes nothing.

    Args:
        report_s: seconds after which a rank that waits is reported.
        timeout_s: seconds after which a collective fails, for the text of the report.
        computes_on_cpu: whether a busy thread computes.
    """
    if duty(WaitReports) is None:
        watcher = running(computes_on_cpu)
        watcher.add(WaitReports(watcher, report_s, rendezvous.timeout(timeout_s)))


def backward_failed(error: BaseException) -> None:
    """Writes into the store that the backward pass of this rank has failed, possibly on this rank only."""
    reports = duty(WaitReports)
    if reports is not None:
        reports.set_failure(f"{type(error).__name__}: {error}".strip().splitlines()[0])


def backward_passed() -> None:
    """Removes that error, because a later backward pass of this rank has succeeded."""
    reports = duty(WaitReports)
    if reports is not None and reports.failure:
        reports.set_failure("")


def last_report(operation: str) -> list[str]:
    """Returns where each rank was when a wait of this rank in `operation` was reported last; [] if none was reported."""
    store = rendezvous.store()
    if not rendezvous.store_answers() or not store.check([_LAST]):
        return []
    texts: dict[str, str] = json.loads(store.get(_LAST))
    # An earlier wait of another operation may have been reported, and may have ended since.
    if not texts.get(str(dist.get_rank()), "").startswith(f"in {operation} at "):
        return []
    return [f"rank {rank}: {text}" for rank, text in texts.items()]


class WaitReports:
    """Is the duty of one process.

    Args:
        watcher: the watcher of this process.
        report_s, timeout_s: as for `watch`.
    """

    def __init__(self, watcher: Watcher, report_s: float, timeout_s: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.failure = ""  # the error of the last backward pass
        self.round = 0  # the number of the next round
        self.look_s = min(LOOK_S, report_s / _LOOKS)
        self._watcher = watcher
        self._report_s = report_s
        self._timeout_s = timeout_s
        self._check_s = min(_MOST_CHECK_S, report_s / _LOOKS)
        self._checked_at = 0.0
        self._next_report_s = report_s
        # While this rank collects the answers of a round that it has opened: where it was then, and until when.
        self._opened: RankPlace | None = None
        self._collects_until = 0.0

    def set_failure(self, failure: str) -> None:
        """Writes the error of a backward pass into the store; "" removes it."""
        self.failure = failure
        # If the store has ended, so has the run, and no rank waits for this one.
        with contextlib.suppress(RuntimeError):
            rendezvous.store().set(f"{_FAILED}/{self.rank}", failure)
            rendezvous.store().add(_FAILED, 1)

    def close(self, why: str) -> None:
        """Has nothing to end."""

    def look(self, look: Look, progress: Progress) -> None:
        """Opens a round, collects its answers, or answers that of another rank."""
        waits_s = progress.waits_s
        if not waits_s:
            self._next_report_s = self._report_s
        if (
            waits_s < min(_HOPELESS_S, self._report_s)
            and self._opened is None
            and look.at - self._checked_at < self._check_s
        ):
            return
        self._checked_at = look.at
        note = f"its last backward pass failed: {self.failure}" if self.failure else ""
        mine = RankPlace(self.rank, os.getpid(), position(look.frames), still_s=waits_s, note=note)
        # If the store ends, so has rank 0 or the launcher, and the main thread finds out by itself.
        with contextlib.suppress(RuntimeError):
            store = self._watcher.store()
            if store is not None:
                self._visit(store, mine, look.at)

    def _visit(self, store: Store, mine: RankPlace, now: float) -> None:
        waits_s = mine.still_s
        if waits_s >= min(_HOPELESS_S, self._report_s):
            self._end_if_hopeless(store, mine)
        if self._opened is not None:
            self._collect(store, mine, self._opened)
        elif waits_s >= self._next_report_s and self._open_round(store):
            self._opened = mine
            self._collects_until = now + 2 * self._check_s + _ANSWER_S
        elif store.check([self._key("opened")]):
            self._answer(store, mine)

    def _key(self, name: str) -> str:
        return f"waits/{self.round}/{name}"

    def _open_round(self, store: Store) -> bool:
        """Opens the round, and returns whether this rank was the first, so that it writes the report."""
        first_rank = bytes(store.compare_set(self._key("opened"), "", str(self.rank))).decode()
        return first_rank == str(self.rank)

    def _answer(self, store: Store, mine: RankPlace) -> None:
        store.set(self._key(f"place/{self.rank}"), json.dumps(asdict(mine)))
        self.round += 1
        self._next_report_s = max(2 * mine.still_s, self._report_s)  # this wait has been reported

    def _collect(self, store: Store, now: RankPlace, mine: RankPlace) -> None:
        """Logs the report once all other ranks have answered or have left, or the time is over.

        Args:
            store: the store.
            now: where this rank is.
            mine: where it was when it opened the round.
        """
        left = departures(store, self.size)
        departed = {departure.rank for departure in left}
        places = {self.rank: mine}
        for rank in range(self.size):
            key = self._key(f"place/{rank}")
            if rank not in departed and store.check([key]):
                places[rank] = read(RankPlace, json.loads(store.get(key)))
        silent = [rank for rank in range(self.size) if rank not in places and rank not in departed]
        if silent and time.monotonic() < self._collects_until:
            return
        self._opened = None
        self._answer(store, mine)
        groups = grouped(places.values())
        # The wait may have ended in the meantime, or all ranks are in the same call.
        if now.still_s <= mine.still_s or (len(groups) == 1 and not left and not silent):
            return
        footer = [str(departure) for departure in left]
        if silent:
            footer.append(f"{ranks_text(silent)} did not answer: stopped, or in a call that lets no other thread run")
        footer.append(
            f"Every rank must make the same calls, as often. If nothing changes, this fails after {self._timeout_s:g} s "
            "(--timeout-s). `--debug` checks each call as it is made; --hang-report-s sets when this is reported, 0: never."
        )
        operation = mine.place.operation if mine.place is not None else ""
        headline = f"rank {self.rank} has waited for {mine.still_s:.0f} s in {operation}; not all ranks are in it:"
        logger("world").warning("%s", short_report(headline, groups, footer))
        texts = {rank: group.text for group in groups for rank in group.ranks}
        store.set(_LAST, json.dumps(dict(sorted(texts.items()))))

    def _end_if_hopeless(self, store: Store, mine: RankPlace) -> None:
        """Ends this process if it waits for a rank whose backward pass has failed, and its own has not failed."""
        # With some plans the forward pass communicates too. A rank that skipped the step is then in its next forward pass. The
        # others may have taken its messages for those of the backward pass, and wait in the forward pass after it.
        operation = mine.place.operation if mine.place is not None else ""
        is_in_pass = "backward" in operation or "forward" in operation
        if self.failure or not is_in_pass or not store.check([_FAILED]):
            return
        for rank in range(self.size):
            key = f"{_FAILED}/{rank}"
            failure = bytes(store.get(key)).decode() if store.check([key]) else ""
            if failure and mine.place is not None:
                end_process(
                    f"paceline: rank {self.rank} ends: it has waited for {mine.still_s:.0f} s {mine.place.text}, "
                    f"and the backward pass of rank {rank} failed: {failure}. Let that error end the script "
                    f"on rank {rank}, or catch it on every rank and skip the step there too."
                )
