"""`RankState` holds what the journal says about one rank: where it is, and where its recent time went."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from paceline_lens.watch.records import Hello, Tick

PHASES = ("data", "forward", "backward", "reduce", "pipeline", "clip", "step", "checkpoint", "rest")
_COLUMN = {name: index for index, name in enumerate(PHASES)}
# An entry that takes longer than this, and than several usual steps, is an interruption: an evaluation or a stopped rank.
_INTERRUPTION_S = 8.0
_INTERRUPTION_STEPS = 5
_FACTS = ("rank", "node", "host", "local_rank", "pid", "device", "restart", "memory_bytes", "base_bytes")
_OF_TICK = ("step", "phase", "at", "memory", "memory_peak")
_SEEN = 0.5  # a rank that was in collectives for more than this share of its time since the last tick waits for others
_WARM_UP = 3  # the first steps are not typical: the model is compiled, memory is first allocated, loaders start


class _RankEntry(NamedTuple):
    """The times of a part of a window: one step or more, or less than a step if it is the last entry."""

    seconds: float
    steps: int
    ms: list[float]


class TickWindow:
    """Sums over the recent past: the last 30 seconds, or the last 30 steps if a step takes longer than a second.

    Attributes:
        seconds: the length of the window.
        steps: the number of steps that ended in it.
        ms: the milliseconds of each of `PHASES`, then for each of them those that were waits for other ranks.
    """

    LENGTH = 30

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.seconds = 0.0
        self.steps = 0
        self.ms = [0.0] * 2 * len(PHASES)
        self._entries: deque[_RankEntry] = deque()

    def add(self, seconds: float, steps: int, ms: list[float]) -> None:
        """Adds the times between two ticks. Ticks without a step share an entry with the next tick that has one.

        After an interruption the window begins anew, since the time of the interruption says nothing about the steps.
        """
        entry = _RankEntry(seconds, steps, ms)
        if self._entries and self._entries[-1].steps == 0:
            last = self._entries.pop()
            entry = _RankEntry(last.seconds + seconds, steps, _added(last.ms, ms))
        complete_s = self.seconds + seconds - entry.seconds
        usual_s = complete_s / max(1, len(self._entries))
        interruption_s = max(_INTERRUPTION_S, _INTERRUPTION_STEPS * usual_s)
        if self._entries and entry.steps and entry.seconds > interruption_s:
            self.clear()
            return
        self._entries.append(entry)
        self.seconds += seconds
        self.steps += steps
        self.ms = _added(self.ms, ms)
        if len(self._entries) > self.LENGTH:
            oldest = self._entries.popleft()
            self.seconds -= oldest.seconds
            self.steps -= oldest.steps
            # Floating-point sums may end a little below zero after subtractions.
            self.ms = [max(0.0, total - ms) for total, ms in zip(self.ms, oldest.ms, strict=True)]

    @property
    def shares(self) -> list[float]:
        """Of each phase, its share of the time that all phases took; zeros before there is any."""
        own = self.ms[: len(PHASES)]
        whole = sum(own) or 1.0
        return [round(ms / whole, 4) for ms in own]

    @property
    def ms_per_step(self) -> list[float] | None:
        """Of each phase, milliseconds in a step; None before a step has ended."""
        return self._per_step(self.ms[: len(PHASES)])

    @property
    def waits_per_step(self) -> list[float] | None:
        """Of each phase, milliseconds in a step in which the rank waited for others; None before a step has ended."""
        return self._per_step(self.ms[len(PHASES) :])

    def _per_step(self, sums: list[float]) -> list[float] | None:
        if not self.steps:
            return None
        return [round(ms / self.steps, 3) for ms in sums]


def _added(first: list[float], second: list[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


class RankState:
    """One rank, since its last start.

    Attributes:
        facts: what it said of itself at its start.
        tick: its last tick; an empty one before there is any.
        heard: when it wrote last, by its host's clock (unix seconds).
        steps: steps since its start.
        window: where its recent time went.
        process: what was found of its process from outside; see `view.py`.
        lows: (step, bytes) of its least memory in each of up to 32 parts of the time since its start: whether it grows.
    """

    _LOWS = 32

    def __init__(self, facts: Hello, t: float) -> None:
        self.facts = facts
        self.tick = Tick()
        self.heard = t
        self.steps = 0
        self.window = TickWindow()
        self.process = ""
        self.lows: list[tuple[int, int]] = []
        self._lows_every = 1  # ticks that share an entry of `lows`
        self._ticks = 0

    def add(self, tick: Tick, t: float) -> None:
        """Takes a tick."""
        ms = [0.0] * 2 * len(PHASES)
        for place, durations in ((0, tick.ms), (len(PHASES), tick.waits)):
            for name, value in durations.items():
                ms[place + _COLUMN.get(name, _COLUMN["rest"])] += value
        self.window.add(max(0.0, t - self.heard), tick.steps, ms)
        if self.steps < _WARM_UP <= self.steps + tick.steps:
            self.window.clear()
        self.steps += tick.steps
        self.heard = max(self.heard, t)
        self.tick = tick
        if tick.memory is not None and self.steps >= _WARM_UP:
            self._note_memory(tick.step, tick.memory)

    def _note_memory(self, step: int, memory: int) -> None:
        if self._ticks % self._lows_every == 0:
            if len(self.lows) == self._LOWS:
                neighbours = zip(self.lows[::2], self.lows[1::2], strict=True)
                self.lows = [min(pair, key=itemgetter(1)) for pair in neighbours]
                self._lows_every *= 2
            self.lows.append((step, memory))
        elif memory < self.lows[-1][1]:
            self.lows[-1] = (step, memory)
        self._ticks += 1

    @property
    def memory_peak(self) -> int:
        """The most bytes that it has held; 0 where that is not known."""
        return self.tick.memory_peak or 0

    def row(self, silent_s: float) -> dict[str, Any]:
        """Returns the rank as the snapshot has it."""
        return {
            **{name: getattr(self.facts, name) for name in _FACTS},
            **{name: getattr(self.tick, name) for name in _OF_TICK},
            "phase_s": round(self.tick.phase_s, 1),
            "waits": self.tick.waits.get(self.tick.phase, 0.0) > _SEEN * self.tick.ms.get(self.tick.phase, 0.0),
            "silent_s": round(silent_s, 1),
            "steps": self.steps,
            "window_steps": self.window.steps,
            "window_s": round(self.window.seconds, 3),
            "memory_growth": self._growth(),
            "process": self.process,
        }

    def _growth(self) -> dict[str, int] | None:
        """Since when and by how much the least memory has grown; None where it has not always grown."""
        # What comes first fills caches and pools; the last entry is not complete.
        recent = self.lows[len(self.lows) // 3 : -1]
        memories = [memory for _, memory in recent]
        grows = all(earlier < later for earlier, later in pairwise(memories))
        if len(recent) < 8 or not grows:
            return None
        first_step, first = recent[0]
        last_step, last = recent[-1]
        return {"since_step": first_step, "bytes": last - first, "steps": last_step - first_step}
