"""`RunProgress` computes how far a run has come and how fast it is, from the ticks of one rank. `RunView` feeds it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from paceline_lens.watch.records import Tick


@dataclass(frozen=True)
class _Count:
    """What had been done when a step had just ended."""

    t: float
    step: int
    samples: int | None
    tokens: int | None


class RunProgress:
    """Counts and rates of a run.

    Attributes:
        tick: the last tick; None before the first one.
        t: the time of the last tick.
        stepped_at: the time of the last tick in which a step ended; None before the first one.
    """

    _WINDOW = 31  # counts; there are a second and a step between two of them, or more
    _SILENCE_S = 3.0

    def __init__(self) -> None:
        self.tick: Tick | None = None
        self.t = 0.0
        self.stepped_at: float | None = None
        self._recent: deque[_Count] = deque(maxlen=self._WINDOW)
        # What was done before the last start, and in how many seconds. Steps that a restart repeats count again.
        self._before = dict.fromkeys(("s", "steps", "samples", "tokens"), 0.0)
        self._first: _Count | None = None

    def restart(self) -> None:
        """Notes that the processes have started again, so that their counts may be smaller than before."""
        if self._first is not None and self._recent:
            for name, value in _difference(self._first, self._recent[-1]).items():
                self._before[name] += value
        self._recent.clear()
        self._first = None

    def add(self, tick: Tick, t: float) -> None:
        """Takes the next tick of the rank."""
        self.tick = tick
        self.t = t
        count = _Count(t, tick.step, tick.samples, tick.tokens)
        if self._recent and count.step < self._recent[-1].step:
            self.restart()  # a rollback to a checkpoint
        if not tick.steps:
            return
        # The time before the first step is left out: it compiles, fills loaders or loads a checkpoint.
        if self._first is None:
            self._first = count
        self._recent.append(count)
        self.stepped_at = t

    def recent(self, now: float) -> dict[str, float | None]:
        """Returns steps, samples and tokens a second over the last 30 seconds or steps; None if they are not known.

        Args:
            now: the current time. The time since the last step counts only if it is much longer than a step.
        """
        if len(self._recent) < 2:
            return dict.fromkeys(("steps_per_s", "samples_per_s", "tokens_per_s"))
        oldest, newest = self._recent[0], self._recent[-1]
        usual_s = (newest.t - oldest.t) / max(1, newest.step - oldest.step)
        stands_s = now - newest.t
        difference = _difference(oldest, newest)
        if stands_s > self._SILENCE_S + 3 * usual_s:
            difference["s"] += stands_s
        return _rates(difference)

    def mean(self) -> dict[str, float | None]:
        """Returns the same over the whole run, without the time before the first step and between two rounds."""
        total = dict(self._before)
        if self._first is not None and self._recent:
            for name, value in _difference(self._first, self._recent[-1]).items():
                total[name] += value
        return _rates(total)

    def usual_step_s(self) -> float | None:
        """Returns the seconds of a step at the recent rate, without the time since the last step; None before it is known."""
        rate = self.recent(0.0)["steps_per_s"] or self.mean()["steps_per_s"]
        return 1 / rate if rate else None

    def done(self) -> dict[str, Any]:
        """Returns the step, the total, and the samples and tokens so far."""
        tick = self.tick or Tick()
        percent = None
        if tick.total:
            percent = round(min(100.0, 100 * tick.step / tick.total), 2)
        return {
            "step": tick.step,
            "total": tick.total,
            "percent": percent,
            "samples": tick.samples,
            "tokens": tick.tokens,
        }


def _difference(first: _Count, last: _Count) -> dict[str, float]:
    """Returns what was done between two counts, and the seconds; 0 for what is not known."""
    difference = {"s": last.t - first.t, "steps": last.step - first.step, "samples": 0.0, "tokens": 0.0}
    if last.samples is not None and first.samples is not None:
        difference["samples"] = last.samples - first.samples
    if last.tokens is not None and first.tokens is not None:
        difference["tokens"] = last.tokens - first.tokens
    return difference


def _rates(difference: dict[str, float]) -> dict[str, float | None]:
    seconds = difference["s"]
    names = {"steps": "steps_per_s", "samples": "samples_per_s", "tokens": "tokens_per_s"}
    if seconds <= 0 or not difference["steps"]:
        return dict.fromkeys(names.values())
    # A rate of 0 stands for a count that is not known.
    return {rate: difference[name] / seconds or None for name, rate in names.items()}
