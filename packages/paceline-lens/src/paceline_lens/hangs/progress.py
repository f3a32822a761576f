"""Decides whether a rank waits for others or makes no progress, and whether a run is stuck. Pure: the caller passes the time.

    each rank      looks at itself once a second: has the main thread moved, did it compute, is it in a long operation?
    waits_s        the seconds for which it has been in one call that waits for other ranks
    still_s        the seconds for which it has shown no sign of life
    the launcher   the ranks of a host are stuck if none has made a step, and all have been still for long enough

A rank that computes, downloads or compiles makes no step either, and the others wait for it. So a run is not stuck as long as
one rank shows a sign of life.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.world.stacks.parse import Frame

LOOK_S = 1.0  # seconds between two looks, at most
LEAST_S = 60.0  # a limit that is a multiple of the usual step is never shorter
# The first steps compile and fill caches, so they take longer than usual.
_ENOUGH_STEPS = 3
_REMEMBERED_STEPS = 64
_BUSY = 0.1  # a process that computes for more than this part of the time is alive
# A thread that waits for one event wakes up less often than this; a thread that reads a stream wakes up more often.
_SWITCHES_PER_S = 5.0
_RATE_S = 0.9 * LOOK_S  # the time over which these two are judged, at least
# A rank that writes nothing for so many looks was stopped, or is in a call that holds the interpreter's lock.
SILENT_LOOKS = 5.0


@dataclass(frozen=True)
class Look:
    """Holds what one look at a rank has found.

    Attributes:
        at: seconds of a clock that only goes forward.
        place: where the main thread is. Two places are equal if the thread has not moved.
        cpu_s: seconds of computation up to now, in the processes whose computation is a sign of life.
        switches: how often the main thread has waited for something and continued, up to now.
        busy_with: the long operation that it is in, such as "saving a checkpoint"; "" for none.
        waits: whether the main thread is in an operation that may wait for other ranks.
        is_new_call: whether no earlier look has seen this call of that operation.
        thread_s: seconds of computation of the main thread up to now; 0 where a busy thread may only be waiting.
        frames: the stack of the main thread, the innermost call first.
    """

    at: float
    place: object
    cpu_s: float = 0.0
    switches: int = 0
    busy_with: str = ""
    waits: bool = False
    is_new_call: bool = False
    thread_s: float = 0.0
    frames: Sequence[Frame] = ()


class Progress:
    """Follows the steps, waits and signs of life of one rank.

    Args:
        stuck_after: the setting: "20x" for so many usual steps (at least `LEAST_S`), or seconds; 0 for never.

    Attributes:
        steps: optimizer steps that have been made.
        still_s: seconds without a sign of life.
        waits_s: seconds for which it has waited for other ranks, in one call; 0 if it does not wait.
        busy_with: that of the last look.
    """

    def __init__(self, stuck_after: str = "0") -> None:
        self._stuck_after = stuck_after
        self.steps = 0
        self.still_s = 0.0
        self.waits_s = 0.0
        self.busy_with = ""
        self._stepped_at: float | None = None
        self._durations: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._steps_seen = 0
        self._last: Look | None = None
        self._rated: Look | None = None  # the look up to which rates were judged

    def stepped(self, at: float) -> None:
        """Records that an optimizer has stepped at a time."""
        if self._stepped_at is not None:
            self._durations.append(at - self._stepped_at)
        self._stepped_at = at
        self.steps += 1

    @property
    def usual_s(self) -> float:
        """How long a step usually takes: the median of the last steps; 0 if there were too few."""
        if len(self._durations) < _ENOUGH_STEPS - 1:
            return 0.0
        return statistics.median(self._durations)

    @property
    def limit_s(self) -> float:
        """The seconds without a sign of life after which this rank is stuck; 0 for never, or if it is not known yet."""
        if self.steps < _ENOUGH_STEPS:
            return 0.0
        if self._stuck_after.endswith("x"):
            multiple = float(self._stuck_after[:-1])
            return max(LEAST_S, multiple * self.usual_s) if multiple else 0.0
        return float(self._stuck_after)

    def look(self, look: Look) -> None:
        """Updates the progress with a new look."""
        last = self._last
        self._last = look
        self.busy_with = look.busy_with
        has_stepped = self.steps != self._steps_seen
        self._steps_seen = self.steps
        if last is None or self._rated is None:
            self._rated = look
            return
        # The process itself may have been stopped since the last look, for example with a laptop. That time does not count.
        elapsed_s = min(look.at - last.at, SILENT_LOOKS * LOOK_S)
        computes = look.thread_s - last.thread_s > _BUSY * elapsed_s
        still_waits = look.waits and not look.is_new_call and not computes
        self.waits_s = self.waits_s + elapsed_s if still_waits else 0.0
        shows_life = has_stepped or look.busy_with or look.place != last.place
        # Over less than a second, a single wake-up or tick of the clock would be a high rate.
        if look.at - self._rated.at >= _RATE_S:
            shows_life = shows_life or self._is_active(self._rated, look)
            self._rated = look
        self.still_s = 0.0 if shows_life else self.still_s + elapsed_s

    @staticmethod
    def _is_active(before: Look, look: Look) -> bool:
        seconds = look.at - before.at
        computes = look.cpu_s - before.cpu_s > _BUSY * seconds
        wakes = look.switches - before.switches > _SWITCHES_PER_S * seconds
        return computes or wakes


@dataclass(frozen=True)
class ProgressReport:
    """Holds what a rank writes about its progress, for whoever watches the ranks of its host.

    Attributes:
        rank: the rank.
        steps, still_s, limit_s, usual_s, busy_with: those of `Progress`.
        others_alive: with several hosts, whether any rank has answered that it is alive since this rank asked.
        collectives: the last collectives of torch's flight recorder.
    """

    rank: int
    steps: int
    still_s: float
    limit_s: float
    usual_s: float
    busy_with: str = ""
    others_alive: bool = False
    collectives: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankLife:
    """Holds what the launcher knows of a rank.

    Attributes:
        report: its last report; None if it has written none yet.
        silent_s: the age of that report.
        is_stopped: whether a signal has stopped it.
        idle_s: seconds for which neither it nor a process that it started has computed.
    """

    report: ProgressReport | None
    silent_s: float = 0.0
    is_stopped: bool = False
    idle_s: float = 0.0


def stuck_for(ranks: Sequence[RankLife]) -> float:
    """Returns for how many seconds the ranks of a host have been stuck; 0 if they are not.

    Args:
        ranks: all ranks of this host.
    """
    durations = []
    for rank in ranks:
        report = rank.report
        # A process that is stopped by a signal may have been stopped in a long operation, but it no longer works on it.
        if report is None or (report.busy_with and not rank.is_stopped):
            return 0.0
        if rank.silent_s > SILENT_LOOKS * LOOK_S:
            # A silent rank that computes may be in a long call that holds the interpreter's lock. That is no hang.
            silence_s = rank.silent_s if rank.is_stopped else min(rank.silent_s, rank.idle_s)
            durations.append(report.still_s + silence_s)
        elif not report.limit_s or report.others_alive:
            return 0.0
        else:
            durations.append(report.still_s)
    limit_s = max((rank.report.limit_s for rank in ranks if rank.report is not None), default=0.0)
    still_s = min(durations, default=0.0)
    return still_s if limit_s and still_s >= limit_s else 0.0
