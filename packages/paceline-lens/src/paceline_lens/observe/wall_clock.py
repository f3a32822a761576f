"""`WallClock`: how long the phases of each step take, and of each micro-batch in it.

Moments are taken where the phase changes (`observe.phases`) and compared later, when the device has passed them, so that
nothing is waited for. On an accelerator they are moments of the device: "data" is the time in which it had nothing to do
because the next batch was not there yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from paceline.base.text_table import text_table
from paceline_lens.observe.clock import Clock, HostClock, Moment
from paceline_lens.observe.phases import NAMES, PhaseListener

_KEPT = 64  # steps whose times can be read one by one


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of one step.

    Attributes:
        step: its number, from 1.
        total_ms: from its beginning to that of the next.
        phases: of each phase; they sum to `total_ms`.
        micro_batches: of each micro-batch, its phases up to the end of its backward pass.
    """

    step: int
    total_ms: float
    phases: Mapping[str, float]
    micro_batches: tuple[Mapping[str, float], ...]


@dataclass
class _Taken:
    """Moments of a step: each with the phase that begins there, and where micro-batches end."""

    step: int
    moments: list[Moment] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    micro: list[int] = field(default_factory=list)


class WallClock(PhaseListener):
    """Times the phases of steps.

    Args:
        clock: takes moments.
        every: steps between two lines told; 0 tells none.
        tell: is given the lines.

    Attributes:
        steps: steps whose times are known.
        recent: the last of them.
    """

    def __init__(self, clock: Clock | None = None, every: int = 1, tell: Callable[[str], None] | None = None) -> None:
        self.every = every
        self.steps = 0
        self.recent: deque[StepTimes] = deque(maxlen=_KEPT)
        self._tell = tell
        self._clock = clock or HostClock()
        self._sums = dict.fromkeys(("total", *NAMES), 0.0)
        self._counted = 0  # steps in the sums
        self._last_report = dict(self._sums), 0  # sums and steps in them at the last line
        self._ended: deque[_Taken] = deque()
        self._now = _Taken(1)
        self._finished = False

    # -- what phases tell ----------------------------------------------------------------------------------------

    def to(self, phase: str) -> None:
        self._now.moments.append(self._clock.now())
        self._now.names.append(phase)

    def micro_batch(self) -> None:
        self._now.micro.append(len(self._now.moments) - 1)

    def ended(self) -> None:
        done = self._now
        if self._finished:
            done.names.pop()
        else:
            done.moments.append(self._clock.now())
        self._now = _Taken(done.step + 1, [self._clock.now()], ["rest"])
        self._ended.append(done)
        self._read()

    def finish(self) -> None:
        """Ends the present step with its last phase, since nothing that a script does after training belongs to a step."""
        self._finished = bool(self._now.names and self._now.names[-1] == "rest")

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, wait: bool = False) -> None:
        """Compares the moments of steps that the device has done."""
        while self._ended and (wait or self._clock.come(self._ended[0].moments[-1])):
            taken = self._ended.popleft()
            self._clock.wait(taken.moments[-1])
            times = self._times(taken)
            if times.step == 2:  # the first one connected and built: it counts only while there is no other
                self._sums = dict.fromkeys(self._sums, 0.0)
                self._last_report = dict(self._sums), 0
                self._counted = 0
            for moment in taken.moments:
                self._clock.back(moment)
            self.recent.append(times)
            self.steps += 1
            self._counted += 1
            for name, ms in (("total", times.total_ms), *times.phases.items()):
                self._sums[name] += ms
            if self.every and self._tell is not None and self.steps % self.every == 0:
                self._tell(self._line(times.step))

    def _times(self, taken: _Taken) -> StepTimes:
        # `own[i]` is the time from moment i to moment i + 1, in which the phase `names[i]` ran.
        own = [self._clock.ms(begin, end) for begin, end in pairwise(taken.moments)]
        micro = []
        for begin, end in zip([0, *taken.micro], taken.micro, strict=False):
            micro.append(_by_phase(taken.names[begin:end], own[begin:end]))
        return StepTimes(taken.step, sum(own), _by_phase(taken.names, own), tuple(micro))

    @property
    def last(self) -> StepTimes | None:
        """The step that ended last; waits for the device to have done it."""
        self._read(wait=True)
        if not self.recent:
            return None
        return self.recent[-1]

    def now(self) -> StepTimes:
        """Returns the times of the present step so far; waits for the device."""
        taken = self._now
        end = self._clock.now()
        self._clock.wait(end)
        return self._times(_Taken(taken.step, [*taken.moments, end], list(taken.names), taken.micro))

    def mean(self) -> dict[str, float]:
        """Returns the mean milliseconds of a step and of its phases. The first step counts only if there is no other."""
        self._read(wait=True)
        if not self._counted:
            return {}
        return {name: ms / self._counted for name, ms in self._sums.items()}

    def _line(self, step: int) -> str:
        before, counted = self._last_report
        count = self._counted - counted
        since = {name: (ms - before[name]) / count for name, ms in self._sums.items()}
        self._last_report = dict(self._sums), self._counted
        parts = [f"{name} {since[name]:.2f}" for name in NAMES if since[name] >= 0.005]  # others would show as 0.00
        phases = ", ".join(parts)
        over = f" (mean of {count})" if count > 1 else ""
        return f"step {step}{over}: {since['total']:.2f} ms = {phases}"

    def text(self) -> str:
        """Returns the means as a table."""
        means = self.mean()
        if not means:
            return "wall clock: no step has ended"
        total = means["total"]
        rows = [["phase", "ms a step", "share"]]
        rows += [[name, f"{means[name]:.2f}", f"{means[name] / total:.1%}"] for name in NAMES if means[name]]
        rows.append(["step as a whole", f"{total:.2f}", "100.0%"])
        return "\n".join([f"wall clock of this rank, mean of {self._counted} steps", *text_table(rows, numbers=True)])


def _by_phase(names: list[str], ms: list[float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, duration in zip(names, ms, strict=False):
        sums[name] = sums.get(name, 0.0) + duration
    return sums
