"""Whether a rank makes progress: what each rank says of itself, and when a run counts as stuck. Pure, with the time given in.

    each rank      once a second: has its main thread moved, has anything computed, is it busy with what may take long?
    still_s        for how long nothing of that was so
    the launcher   a run is stuck where no rank of it has made a step, and all have been still for long enough

A rank that computes, downloads or compiles makes no step either, and the others wait for it: so one rank that is alive is
enough for the run not to be stuck.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_S = 60.0  # a limit that is a multiple of the usual step is never shorter
_ENOUGH_STEPS = 3  # the first steps compile, and fill caches: they say nothing of the usual one
_REMEMBERED_STEPS = 64
_BUSY = 0.1  # a process that computes for more than this part of the time is alive
_SWITCHES_PER_S = 5.0  # a thread that waits for one thing wakes less often than this; one that reads a stream, more
# A rank that says nothing for so many looks was stopped, or is in a call that lets no other thread run.
SILENT_LOOKS = 5.0


@dataclass(frozen=True)
class Look:
    """What one look at a rank has seen.

    Attributes:
        at: seconds of a clock that only goes forward.
        place: where the main thread is; equal at two looks that have found it at the same place.
        cpu_s: seconds that have been computed so far, by whatever counts as a sign of life.
        switches: how often the main thread has waited for something and gone on, so far.
        busy_with: what it is in that may take long ("saving a checkpoint"); "" for nothing of that kind.
    """

    at: float
    place: object
    cpu_s: float = 0.0
    switches: int = 0
    busy_with: str = ""


class Progress:
    """The steps and signs of life of one rank.

    Args:
        stuck_after: the setting: "20x" for so many usual steps (at least `LEAST_S`), or seconds; 0 for never.
        look_s: seconds between two looks.

    Attributes:
        steps: optimizer steps that have been made.
        still_s: for how long there has been no sign of life.
        busy_with: as the last look has it.
    """

    def __init__(self, stuck_after: str, look_s: float) -> None:
        self._stuck_after = stuck_after
        self._look_s = look_s
        self.steps = 0
        self.still_s = 0.0
        self.busy_with = ""
        self._stepped_at: float | None = None
        self._durations: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._steps_seen = 0
        self._last: Look | None = None

    def stepped(self, at: float) -> None:
        """An optimizer has stepped."""
        if self._stepped_at is not None:
            self._durations.append(at - self._stepped_at)
        self._stepped_at = at
        self.steps += 1

    @property
    def usual_s(self) -> float:
        """How long a step usually takes: the median of the last ones; 0 where there were not enough."""
        return statistics.median(self._durations) if len(self._durations) >= _ENOUGH_STEPS - 1 else 0.0

    @property
    def limit_s(self) -> float:
        """After how long without a sign of life this rank counts as stuck; 0 where it never does, or not yet."""
        if self.steps < _ENOUGH_STEPS:
            return 0.0
        if self._stuck_after.endswith("x"):
            multiple = float(self._stuck_after[:-1])
            return max(LEAST_S, multiple * self.usual_s) if multiple else 0.0
        return float(self._stuck_after)

    def look(self, look: Look) -> None:
        """Takes in what a look has seen."""
        last, self._last = self._last, look
        self.busy_with = look.busy_with
        has_stepped = self.steps != self._steps_seen
        self._steps_seen = self.steps
        if last is None or has_stepped or look.busy_with or self._is_alive(last, look):
            self.still_s = 0.0
            return
        # A process that was stopped, with all others or by a laptop's lid, has not been waiting in that time.
        self.still_s += min(look.at - last.at, SILENT_LOOKS * self._look_s)

    @staticmethod
    def _is_alive(last: Look, look: Look) -> bool:
        seconds = max(look.at - last.at, 1e-3)
        computes = look.cpu_s - last.cpu_s > _BUSY * seconds
        wakes = look.switches - last.switches > _SWITCHES_PER_S * seconds
        return computes or wakes or look.place != last.place


@dataclass(frozen=True)
class ProgressReport:
    """What a rank says of its progress.

    Attributes:
        steps, still_s, limit_s, usual_s, busy_with: as of `Progress`.
        others_alive: of a run on several hosts: whether any rank has said that it is alive, since this one asked.
        collectives: the last ones of torch's flight recorder.
    """

    steps: int
    still_s: float
    limit_s: float
    usual_s: float
    busy_with: str = ""
    others_alive: bool = False
    collectives: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankLife:
    """A rank, as its launcher sees it.

    Attributes:
        report: what it said last; None where it has said nothing yet.
        silent_s: how long ago that was.
        is_stopped: whether a signal keeps it from running.
        idle_s: for how long it has not computed, nor anything that it has started.
    """

    report: ProgressReport | None
    silent_s: float = 0.0
    is_stopped: bool = False
    idle_s: float = 0.0


def stuck_for(ranks: Sequence[RankLife], look_s: float) -> float:
    """For how many seconds the ranks of a host have been stuck; 0 where they are not.

    Args:
        ranks: all of this host.
        look_s: seconds between two looks of a rank at itself.
    """
    durations = []
    for rank in ranks:
        report = rank.report
        if report is None or report.busy_with:
            return 0.0
        if rank.silent_s > SILENT_LOOKS * look_s:
            # A silent rank that computes may be in a long call that lets no other thread run: that is no hang.
            silence_s = rank.silent_s if rank.is_stopped else min(rank.silent_s, rank.idle_s)
            durations.append(report.still_s + silence_s)
        elif not report.limit_s or report.others_alive:
            return 0.0
        else:
            durations.append(report.still_s)
    limit_s = max((rank.report.limit_s for rank in ranks if rank.report is not None), default=0.0)
    still_s = min(durations, default=0.0)
    return still_s if limit_s and still_s >= limit_s else 0.0
