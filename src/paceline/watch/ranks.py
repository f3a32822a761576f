"""`RankState`: what the journal says of one rank: where it is, and where its recent time went."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

from paceline.watch.records import Hello, Tick

PHASES = ("data", "forward", "backward", "reduce", "pipeline", "clip", "step", "checkpoint", "rest")
_COLUMN = {name: index for index, name in enumerate(PHASES)}
# What takes longer than this, and than several of the usual steps, is an interruption: an evaluation, a rank that was stopped.
_INTERRUPTION_S = 8.0
_INTERRUPTION_STEPS = 5
_FACTS = ("rank", "node", "host", "local_rank", "pid", "device", "restart", "memory_bytes")
_SEEN = 0.5  # of its time since the last tick: a rank that was seen inside of collectives for longer waits for others
_WARM_UP = 3  # steps after a start that say nothing of those to come: compiling, first allocations, loaders that start


class Window:
    """Sums over the recent past: the last 30 seconds, or the last 30 steps where a step takes longer.

    Attributes:
        seconds: how long it is.
        steps: steps that ended in it.
        ms: milliseconds of each of `PHASES`, then those of them that were waits for other ranks.
    """

    LENGTH = 30

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.seconds = 0.0
        self.steps = 0
        self.ms = [0.0] * 2 * len(PHASES)
        self._entries: deque[tuple[float, int, list[float]]] = deque()
        self._is_open = False

    def add(self, seconds: float, steps: int, ms: list[float]) -> None:
        """Adds what went on between two ticks. Ticks without a step go into one entry with the next that has one.

        After an interruption the window begins anew: what it was lost to says nothing of the steps.
        """
        if self._is_open:
            last_seconds, last_steps, last_ms = self._entries.pop()
            entry = (last_seconds + seconds, last_steps + steps, [a + b for a, b in zip(last_ms, ms, strict=True)])
        else:
            entry = (seconds, steps, ms)
        usual_s = (self.seconds + seconds - entry[0]) / max(1, len(self._entries))
        if self._entries and entry[1] and entry[0] > max(_INTERRUPTION_S, _INTERRUPTION_STEPS * usual_s):
            self.clear()
            return
        self._entries.append(entry)
        self._is_open = entry[1] == 0
        self.seconds += seconds
        self.steps += steps
        self.ms = [a + b for a, b in zip(self.ms, ms, strict=True)]
        if len(self._entries) > self.LENGTH:
            old_seconds, old_steps, old_ms = self._entries.popleft()
            self.seconds -= old_seconds
            self.steps -= old_steps
            self.ms = [max(0.0, a - b) for a, b in zip(self.ms, old_ms, strict=True)]

    @property
    def shares(self) -> list[float]:
        """Of each phase, its share of the time that all phases took; zeros before there is any."""
        own = self.ms[: len(PHASES)]
        whole = sum(own)
        return [round(ms / whole, 4) if whole else 0.0 for ms in own]

    @property
    def ms_per_step(self) -> list[float] | None:
        """Of each phase, milliseconds in a step; None before a step has ended."""
        return self._per_step(self.ms[: len(PHASES)])

    @property
    def waits_per_step(self) -> list[float] | None:
        """Of each phase, milliseconds in a step in which the rank waited for others; None before a step has ended."""
        return self._per_step(self.ms[len(PHASES) :])

    def _per_step(self, sums: list[float]) -> list[float] | None:
        return [round(ms / self.steps, 3) for ms in sums] if self.steps else None


class RankState:
    """One rank, since its last start.

    Attributes:
        facts: what it said of itself at its start.
        tick: its last tick; None before there is one.
        heard: when it wrote last, by its host's clock (unix seconds).
        steps: steps since its start.
        window: where its recent time went.
        process: what was found of its process from outside; see `view.py`.
        lows: (step, bytes) of its least memory in each of up to 32 parts of the time since its start: whether it grows.
    """

    _LOWS = 32

    def __init__(self, facts: Hello, t: float) -> None:
        self.facts = facts
        self.tick: Tick | None = None
        self.heard = t
        self.steps = 0
        self.window = Window()
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
                pairs = [self.lows[index : index + 2] for index in range(0, self._LOWS, 2)]
                self.lows = [min(pair, key=lambda low: low[1]) for pair in pairs]
                self._lows_every *= 2
            self.lows.append((step, memory))
        elif memory < self.lows[-1][1]:
            self.lows[-1] = (step, memory)
        self._ticks += 1

    @property
    def memory_peak(self) -> int:
        """The most bytes that it has held; 0 where that is not known."""
        return 0 if self.tick is None else self.tick.memory_peak or 0

    def row(self, silent_s: float) -> dict[str, Any]:
        """The rank as the snapshot has it."""
        facts, tick = self.facts, self.tick or Tick()
        return {
            **{name: getattr(facts, name) for name in _FACTS},
            **{name: getattr(tick, name) for name in ("step", "phase", "at", "memory", "memory_peak")},
            "phase_s": round(tick.phase_s, 1),
            "waits": tick.waits.get(tick.phase, 0.0) > _SEEN * tick.ms.get(tick.phase, 0.0),
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
        if len(recent) < 8 or any(later <= earlier for (_, earlier), (_, later) in pairwise(recent)):
            return None
        first_step, first = recent[0]
        last_step, last = recent[-1]
        return {"since_step": first_step, "bytes": last - first, "steps": last_step - first_step}
