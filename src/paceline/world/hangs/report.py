"""Hang reports: who waits where, and for whom. No message travels between ranks as long as nobody waits long.

    each rank    a thread looks every few seconds whether the main thread is still in the same call, which may wait
    after `report_s`  a rank that waits opens a round in the store; whoever is first writes the report
    the others   see the round at their next look, and answer where they are
    the report   is logged by one rank: who waits in which line, who is elsewhere, who has left

A rank whose backward pass failed alone leaves word of it. The others would wait until the timeout for gradients that never
come, and cannot be woken inside of gloo: they end, and say why.

The loop does not know of all this: the thread reads the main thread's stack, and nothing is marked in a step.
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
from paceline.world import rendezvous
from paceline.world.departures import Departure, departures
from paceline.world.places import call_site, operation, path_of, waiting_frame

if TYPE_CHECKING:
    from paceline.torch_internals.groups import Store

_MOST_LOOK_S, _LOOKS = 1.0, 6  # seconds between two looks at most; looks before a report
_MOST_CHECK_S = 5.0  # seconds at most between two looks into the store, whether another rank has opened a round
_ANSWER_S = 2.0  # how long an answer may take, beside the time until the next look
_POLL_S = 0.05
_BUSY = 0.1  # a thread that computes for more than this part of the time does not wait
_HOPELESS_S = 5.0  # how long a rank waits, at most, for gradients of a rank whose backward pass has failed


@dataclass(frozen=True)
class State:
    """Where one rank is.

    Attributes:
        rank: which one.
        where: the line of the script.
        path: all lines of the script that led there.
        operation: what it waits in; "" where it does not wait for other ranks.
        since_s: how long it has waited.
        failed: the error of its last backward pass; "" where that passed.
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
    """Begins to watch the main thread of this process, until it leaves its group; a second call changes nothing.

    Args:
        report_s: seconds after which a rank that waits is reported; 0 for never.
        timeout_s: seconds after which a collective fails; only told.
        computes_on_cpu: whether a thread that is busy computes; beside an accelerator it may just as well wait busily.
    """
    reports = rendezvous.companion_of(HangReports)
    if report_s and (reports is None or not reports.alive):
        rendezvous.accompany(HangReports(report_s, rendezvous.timeout(timeout_s), computes_on_cpu))


def backward_failed(error: BaseException) -> None:
    """Leaves word that the backward pass of this rank ended with an error, which may come up on this rank alone."""
    reports = rendezvous.companion_of(HangReports)
    if reports is not None and reports.alive:
        reports.set_failure(f"{type(error).__name__}: {error}".strip().splitlines()[0])


def backward_passed() -> None:
    """Takes that word back, as a later backward pass of this rank has ended well."""
    reports = rendezvous.companion_of(HangReports)
    if reports is not None and reports.failure and reports.alive:
        reports.set_failure("")


class HangReports:
    """The thread of one process.

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
        # A connection of the thread's own, made where the main thread may hold the other.
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
        """Leaves word of the error of a backward pass; "" takes it back."""
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
                    return  # rank 0 or the launcher has ended: nobody is left to ask
                store = self._reachable_store(state)
                if is_long:
                    self._end_if_hopeless(store, state)
                if state.waits and state.since_s >= self._next_report_s and self._open_round(store):
                    self._report(store, state)
                elif store.check([self._key("opened")]):
                    self._answer(store, state)
        except RuntimeError:
            return  # the store has ended, and with it rank 0 or the launcher: the main thread finds out by itself

    def _look(self) -> State:
        """Where the main thread is, and since when it has been waiting there."""
        assert self._main.ident is not None, "the main thread has begun"
        frame = sys._current_frames()[self._main.ident]
        site = call_site(frame)
        waiting = waiting_frame(frame)
        now = time.monotonic()
        cpu_s = self._clock()
        busy = cpu_s - self._cpu_s > _BUSY * self._look_s
        self._cpu_s = cpu_s
        failed = self.failure
        if waiting is None:
            self._waits_since, self._next_report_s = now, self._report_s
            return State(self.rank, site.where, path_of(frame), failed=failed)
        if _mark(waiting) or (busy and self._computes_on_cpu):
            self._waits_since, self._next_report_s = now, self._report_s
        since_s = now - self._waits_since
        return State(self.rank, site.where, path_of(frame), operation(waiting), since_s, failed)

    def _reachable_store(self, state: State) -> Store:
        """The store; over a connection of its own once the main thread waits long, maybe with the other in its hands."""
        if self._own_store is None and state.waits and state.since_s > self._report_s / 2:
            self._own_store = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        return self._own_store or self._store

    def _key(self, name: str) -> str:
        return f"hangs/{self._round}/{name}"

    def _open_round(self, store: Store) -> bool:
        """Whether this rank is the one that writes the report of the round."""
        return bool(bytes(store.compare_set(self._key("opened"), "", str(self.rank))) == str(self.rank).encode())

    def _answer(self, store: Store, state: State) -> None:
        store.set(self._key(f"state/{self.rank}"), json.dumps(asdict(state)))
        self._round += 1
        self._next_report_s = max(2 * state.since_s, self._report_s)  # this wait has been reported

    def _report(self, store: Store, mine: State) -> None:
        """Collects the answers, and logs what they say."""
        states, left = self._collect(store)
        self._answer(store, mine)
        now = self._look()
        if now.waits and now.since_s > mine.since_s:  # it may have ended in the meantime
            text = report({**states, self.rank: mine}, left, self.size, self._timeout_s)
            if text:
                logger("world").warning("%s", text)

    def _collect(self, store: Store) -> tuple[dict[int, State], list[Departure]]:
        states: dict[int, State] = {}
        left: list[Departure] = []
        until = time.monotonic() + 2 * self._check_s + _ANSWER_S
        while time.monotonic() < until and len(states) + len(left) < self.size - 1:
            if self._stop.wait(_POLL_S):
                break
            left = departures(store, self.size)
            departed = {departure.rank for departure in left}
            for rank in set(range(self.size)) - set(states) - departed - {self.rank}:
                key = self._key(f"state/{rank}")
                if store.check([key]):
                    states[rank] = State(**json.loads(store.get(key)))
        return states, left

    def _end_if_hopeless(self, store: Store, state: State) -> None:
        """Ends this process where it waits for a rank whose backward pass has failed, and has not failed itself."""
        # Under plans whose forward pass communicates, a rank that skipped the step is in its next forward pass, whose messages
        # the others may have taken for those of the backward pass: then they wait in the one after it.
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


def report(states: dict[int, State], left: list[Departure], size: int, timeout_s: float) -> str:
    """The text of a report; "" where all ranks are in the same place, and none is missing.

    Args:
        states: by rank, of those that have answered.
        left: the ranks that have left.
        size: of the world.
        timeout_s: when the wait will fail.
    """
    departed = {departure.rank for departure in left}
    silent = [rank for rank in range(size) if rank not in states and rank not in departed]
    waiting = [state for state in states.values() if state.waits]
    if not left and not silent and len({(state.operation, state.path) for state in states.values()}) == 1:
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
        lines.append(
            f"  {_ranks(silent)} did not answer: it was stopped, or is in a call that lets no other thread run"
        )
    lines.append(
        f"  Every rank must make the same calls, as often. If nothing changes, this fails after {timeout_s:g} s "
        "(--timeout-s). `--debug` checks each call as it is made; --hang-report-s sets when this is reported, 0: never."
    )
    return "\n".join(lines)


def _in_words(state: State) -> str:
    text = f"waiting in {state.operation} at {state.where}" if state.waits else f"elsewhere, at {state.where}"
    if state.failed:
        text += f" (its last backward pass failed: {state.failed})"
    return text


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _mark(frame: FrameType) -> bool:
    """Marks a frame as seen; whether it is seen for the first time.

    Python makes the frame object anew for each call, at an address where another may have been; and to keep a reference
    would keep tensors alive. The attribute tells a debugger to step over the lines of this one call of a library.
    """
    first = frame.f_trace_lines
    frame.f_trace_lines = False
    return first


def _clock_of(thread: threading.Thread) -> Callable[[], float]:
    """A function that gives the seconds for which a thread has computed; of 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid") or thread.ident is None:
        return lambda: 0.0
    number = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.clock_gettime(number)
