"""Hang reports: which rank waits where, and for which. Ranks send nothing as long as none of them waits for long.

    each rank         a thread looks once a second or more often whether the main thread is still in the same waiting call
    after `report_s`  a rank that waits opens a round in the store; the first one writes the report
    the others        see the round at their next look, and answer where they are
    the report        one rank logs it: which ranks wait in which line, which are elsewhere, and which have left

A rank whose backward pass has failed writes that into the store. The other ranks would wait for its gradients until the
timeout, and cannot be interrupted inside gloo. So they end, and print the reason.

The training loop does nothing for this: the thread reads the stack of the main thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.base.log import logger
from paceline.world import lifetime, rendezvous
from paceline.world.departures import Departure, departures
from paceline.world.places import call_site, frame_of_thread, operation, path_of, waiting_frame

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_MOST_LOOK_S = 1.0  # seconds between two looks, at most
_LOOKS = 6  # looks before a report, at least
_MOST_CHECK_S = 5.0  # seconds at most between two looks into the store, whether another rank has opened a round
_ANSWER_S = 2.0  # how long an answer may take, beside the time until the next look
_POLL_S = 0.05
_BUSY = 0.1  # a thread that computes for more than this part of the time does not wait
_LAST = "hangs/last"  # where the store has the last report
_HOPELESS_S = 5.0  # how long a rank waits, at most, for gradients of a rank whose backward pass has failed


@dataclass(frozen=True)
class StuckState:
    """Holds where one rank is.

    Attributes:
        rank: the rank.
        where: its line of the script.
        path: all lines of the script on its stack.
        operation: the operation in which it waits for other ranks; "" if it does not wait.
        since_s: how long it has waited, in seconds.
        failed: the error of its last backward pass; "" for none.
    """

    rank: int
    where: str
    path: str
    operation: str = ""
    since_s: float = 0.0
    failed: str = ""

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.operation)


def watch(report_s: float, timeout_s: float | None, computes_on_cpu: bool) -> None:
    """Starts to watch the main thread of this process, until it leaves its group. A second call changes nothing.

    Args:
        report_s: seconds after which a rank that waits is reported; 0 for never.
        timeout_s: seconds after which a collective fails, for the text of the report.
        computes_on_cpu: whether a busy thread computes. With an accelerator, a busy thread may only be waiting.
    """
    reports = lifetime.kept(HangReports)
    if report_s and (reports is None or not reports.alive):
        lifetime.keep(HangReports(report_s, rendezvous.timeout(timeout_s), computes_on_cpu))


def backward_failed(error: BaseException) -> None:
    """Writes into the store that the backward pass of this rank has failed, possibly on this rank only."""
    reports = lifetime.kept(HangReports)
    if reports is not None and reports.alive:
        reports.set_failure(f"{type(error).__name__}: {error}".strip().splitlines()[0])


def backward_passed() -> None:
    """Removes that error, because a later backward pass of this rank has succeeded."""
    reports = lifetime.kept(HangReports)
    if reports is not None and reports.failure and reports.alive:
        reports.set_failure("")


def last_report(operation: str) -> list[str]:
    """Returns what each rank did when a wait of this rank in `operation` was reported last; [] if none was reported."""
    store = rendezvous.store()
    if not rendezvous.store_answers() or not store.check([_LAST]):
        return []
    words: dict[str, str] = json.loads(store.get(_LAST))
    # An earlier wait of another operation may have been reported, and may have ended since.
    if not words.get(str(dist.get_rank()), "").startswith(f"waiting in {operation} "):
        return []
    return [f"rank {rank}: {text}" for rank, text in words.items()]


class HangReports:
    """Runs the thread of one process.

    Args:
        report_s, timeout_s, computes_on_cpu: as for `watch`.
    """

    def __init__(self, report_s: float, timeout_s: float, computes_on_cpu: bool) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._report_s = report_s
        self._timeout_s = timeout_s
        self._computes_on_cpu = computes_on_cpu
        self._look_s = min(_MOST_LOOK_S, report_s / _LOOKS)
        self._check_s = min(_MOST_CHECK_S, report_s / _LOOKS)
        self._next_report_s = report_s
        self._store = rendezvous.store()
        # A connection that only the thread uses. It is made when the main thread may be waiting on the other one.
        self._own_store: Store | None = None
        self._round = 0
        self.failure = ""
        self._main = threading.main_thread()
        self._clock = _clock_of(self._main)
        self._cpu_s = self._waits_since = 0.0
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="paceline-hangs", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it watches this process."""
        return self._pid == os.getpid() and not self._stop.is_set()

    def close(self, why: str) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(_ANSWER_S)

    def set_failure(self, failure: str) -> None:
        """Writes the error of a backward pass into the store; "" removes it."""
        self.failure = failure
        try:
            self._store.set(f"hangs/failed/{self.rank}", failure)
            self._store.add("hangs/failed", 1)
        except RuntimeError:  # the store has ended, and with it the run
            self._stop.set()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            checked_at = 0.0
            while not self._stop.wait(self._look_s):
                state = self._look()
                is_long = state.waits and state.since_s >= min(_HOPELESS_S, self._report_s)
                if not is_long and time.monotonic() - checked_at < self._check_s:
                    continue
                checked_at = time.monotonic()
                if not rendezvous.store_answers(self._store):
                    return  # rank 0 or the launcher has ended, and the store with it
                store = self._reachable_store(state)
                if is_long:
                    self._end_if_hopeless(store, state)
                if state.waits and state.since_s >= self._next_report_s and self._open_round(store):
                    self._report(store, state)
                elif store.check([self._key("opened")]):
                    self._answer(store, state)
        except RuntimeError:
            return  # the store has ended, and with it rank 0 or the launcher: the main thread finds out by itself

    def _look(self) -> StuckState:
        """Returns where the main thread is, and for how long it has been waiting there."""
        assert self._main.ident is not None, "the main thread has begun"
        with frame_of_thread(self._main.ident) as frame:
            assert frame is not None, "the main thread ends last"
            site = call_site(frame)
            path = path_of(frame)
            waiting = waiting_frame(frame)
            name = operation(waiting) if waiting is not None else ""
        now = time.monotonic()
        cpu_s = self._clock()
        busy = cpu_s - self._cpu_s > _BUSY * self._look_s
        self._cpu_s = cpu_s
        failed = self.failure
        if waiting is None:
            self._waits_since, self._next_report_s = now, self._report_s
            return StuckState(self.rank, site.where, path, failed=failed)
        if _mark(waiting) or (busy and self._computes_on_cpu):
            self._waits_since, self._next_report_s = now, self._report_s
        since_s = now - self._waits_since
        return StuckState(self.rank, site.where, path, name, since_s, failed)

    def _reachable_store(self, state: StuckState) -> Store:
        """Returns the store, over a connection of the thread once the main thread waits long: it may be using the other one."""
        if self._own_store is None and state.waits and state.since_s > self._report_s / 2:
            self._own_store = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        return self._own_store or self._store

    def _key(self, name: str) -> str:
        return f"hangs/{self._round}/{name}"

    def _open_round(self, store: Store) -> bool:
        """Opens the round, and returns whether this rank was the first, so that it writes the report."""
        first_rank = bytes(store.compare_set(self._key("opened"), "", str(self.rank))).decode()
        return first_rank == str(self.rank)

    def _answer(self, store: Store, state: StuckState) -> None:
        store.set(self._key(f"state/{self.rank}"), json.dumps(asdict(state)))
        self._round += 1
        self._next_report_s = max(2 * state.since_s, self._report_s)  # this wait has been reported

    def _report(self, store: Store, mine: StuckState) -> None:
        """Collects the answers of the other ranks, and logs the report."""
        states, left = self._collect(store)
        self._answer(store, mine)
        now = self._look()
        # The wait may have ended in the meantime.
        if now.waits and now.since_s > mine.since_s:
            text = report({**states, self.rank: mine}, left, self.size, self._timeout_s)
            if text:
                logger("world").warning("%s", text)
                words = {rank: _in_words(state) for rank, state in sorted({**states, self.rank: mine}.items())}
                store.set(_LAST, json.dumps(words))

    def _collect(self, store: Store) -> tuple[dict[int, StuckState], list[Departure]]:
        states: dict[int, StuckState] = {}
        left: list[Departure] = []
        until = time.monotonic() + 2 * self._check_s + _ANSWER_S
        while time.monotonic() < until and len(states) + len(left) < self.size - 1:
            if self._stop.wait(_POLL_S):
                break
            left = departures(store, self.size)
            departed = {departure.rank for departure in left}
            missing = set(range(self.size)) - set(states) - departed - {self.rank}
            for rank in missing:
                key = self._key(f"state/{rank}")
                if store.check([key]):
                    states[rank] = StuckState(**json.loads(store.get(key)))
        return states, left

    def _end_if_hopeless(self, store: Store, state: StuckState) -> None:
        """Ends this process if it waits for a rank whose backward pass has failed, and its own has not failed."""
        # With some plans the forward pass communicates too. A rank that skipped the step is then in its next forward pass. The
        # others may have taken its messages for those of the backward pass, and wait in the forward pass after it.
        is_in_pass = "backward" in state.operation or "forward" in state.operation
        if self.failure or not is_in_pass or not store.check(["hangs/failed"]):
            return
        for rank in range(self.size):
            key = f"hangs/failed/{rank}"
            failure = bytes(store.get(key)).decode() if store.check([key]) else ""
            if failure:
                sys.stderr.write(
                    f"paceline: rank {state.rank} ends: it has waited for {state.since_s:.0f} s in {state.operation} at "
                    f"{state.where}, and the backward pass of rank {rank} failed: {failure}. Let that error end the script "
                    f"on rank {rank}, or catch it on every rank and skip the step there too.\n"
                )
                sys.stderr.flush()
                os._exit(1)


def report(states: dict[int, StuckState], left: list[Departure], size: int, timeout_s: float) -> str:
    """Returns the text of a report; "" if all ranks are at the same place, and none is missing.

    Args:
        states: the states of the ranks that have answered, by rank.
        left: the ranks that have left.
        size: the number of ranks.
        timeout_s: seconds after which the wait fails.
    """
    departed = {departure.rank for departure in left}
    silent = [rank for rank in range(size) if rank not in states and rank not in departed]
    waiting = [state for state in states.values() if state.waits]
    places = {(state.operation, state.path) for state in states.values()}
    if not left and not silent and len(places) == 1:
        return ""
    longest = max(waiting, key=lambda state: state.since_s)
    lines = [
        f"rank {longest.rank} has waited for {longest.since_s:.0f} s in {longest.operation}; not all ranks are in it:"
    ]
    ranks_by_state: dict[str, list[int]] = {}
    for rank in sorted(states):
        ranks_by_state.setdefault(_in_words(states[rank]), []).append(rank)
    for state_in_words, ranks in ranks_by_state.items():
        lines.append(f"  {_ranks(ranks)}: {state_in_words}")
    lines += [f"  {departure}" for departure in left]
    if silent:
        lines.append(f"  {_ranks(silent)} did not answer: stopped, or in a call that lets no other thread run")
    lines.append(
        f"  Every rank must make the same calls, as often. If nothing changes, this fails after {timeout_s:g} s "
        "(--timeout-s). `--debug` checks each call as it is made; --hang-report-s sets when this is reported, 0: never."
    )
    return "\n".join(lines)


def _in_words(state: StuckState) -> str:
    text = f"elsewhere, at {state.where}"
    if state.waits:
        text = f"waiting in {state.operation} at {state.where}"
    if state.failed:
        text += f" (its last backward pass failed: {state.failed})"
    return text


def _ranks(ranks: list[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


def _mark(frame: FrameType) -> bool:
    """Marks a frame as seen, and returns whether it was not marked before.

    A later call may have its frame at the same address, so addresses cannot be compared. A reference to the frame would keep
    tensors alive. So an attribute is used that only tells a debugger to step over the lines of this one call.
    """
    is_new = frame.f_trace_lines
    frame.f_trace_lines = False
    return is_new


def _clock_of(thread: threading.Thread) -> Callable[[], float]:
    """Returns a function that returns the seconds for which a thread has computed; always 0 if the system does not say."""
    if not hasattr(time, "pthread_getcpuclockid") or thread.ident is None:
        return lambda: 0.0
    number = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.clock_gettime(number)
