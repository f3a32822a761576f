"""`Telemetry`: what one rank writes into the journal of a watched run, once a second.

    training thread   `Phases`: one reading of the clock and one addition of integers for each change of phase
    thread            20 times a second: whether the training thread waits for other ranks
                      once a second: what was added since -> a `Tick`; on the main rank logged values too -> one write

The times are the host's. On an accelerator, whose work the host only queues, the time of a step shows in the phase in
which the host waits for the device. Nothing here waits for it: a value that lies there is copied where it is logged, and
read a second later, by the thread.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

import torch

from paceline.base.log import warn_once
from paceline.observe.phases import NAMES, Phases
from paceline.watch.journal import JournalWriter
from paceline.watch.records import Record, Tick, Values
from paceline.world.places import line_of, waits_for_ranks

_log = logging.getLogger("paceline.observe")
_PERIOD_S = 1.0
_LOOKS = 20  # at the training thread in a period, whether it waits for other ranks
_WAITS_S = 5.0  # a phase that lasts longer is said to wait, and where
_LINES_A_SECOND = 20
_MOST_NAMES = 1000
_JOIN_S = 5.0
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACELINE = str(sys.modules["paceline"].__path__[0])

Value = float | torch.Tensor


@dataclass(frozen=True)
class Progress:
    """How far a run has come; what is not known is None.

    Attributes:
        step: optimizer steps that have ended, those before a resume included.
        total: steps of the whole run.
        samples, tokens: consumed, over all ranks.
        loss_scale, skipped_steps: of the loss scaler.
    """

    step: int = 0
    total: int | None = None
    samples: int | None = None
    tokens: int | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None


class Telemetry:
    """Records what this rank does.

    Args:
        writer: of this rank's file.
        phases: of the run.
        progress: how far the run has come.
        memory: bytes now, and at the peak.
        main: whether this rank writes the values too.

    Ranks: each has its own; nothing here communicates.
    """

    def __init__(
        self,
        writer: JournalWriter,
        phases: Phases,
        progress: Callable[[], Progress],
        memory: Callable[[], tuple[int, int]],
        *,
        main: bool,
    ) -> None:
        self._writer = writer
        self._phases = phases
        self._progress = progress
        self._memory = memory
        self._main = main
        self._pid = os.getpid()
        self._trains = threading.get_ident()
        self._written_ns, _, _ = phases.times()
        self._written_steps = phases.steps
        self._pending: list[tuple[float, int, dict[str, Value]]] = []
        self._names: set[str] = set()
        self._norm: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._tick_lock = threading.Lock()
        self._looks = dict.fromkeys(NAMES, 0)  # of the thread at the training thread, since the last tick
        self._waiting_looks = dict.fromkeys(NAMES, 0)  # those at which it waited for other ranks
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False

    # -- what the run tells ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to write."""
        self._thread = threading.Thread(target=self._run, name="paceline-telemetry", daemon=True)
        self._thread.start()

    def record(self, record: Record) -> None:
        """Writes a line now."""
        self._write([(record, None)])

    def log(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Takes numbers that were logged; what is no number is left out.

        Of more than 20 calls in a second the last value of each name is kept, and of more than 1,000 names the first.
        """
        if not self._main:
            return
        numbers: dict[str, Value] = {}
        for name, value in values.items():
            number = _number_of(value)
            if number is not None and self._may_log(str(name)):
                numbers[str(name)] = number
        if not numbers:
            return
        step = self._progress().step if step is None else step
        with self._lock:
            if len(self._pending) < _LINES_A_SECOND:
                self._pending.append((time.time(), step, numbers))
            else:
                _, _, merged = self._pending[-1]
                self._pending[-1] = (time.time(), step, {**merged, **numbers})

    def clipped(self, norm: torch.Tensor) -> None:
        """Takes the norm of the gradients before they were clipped."""
        if self._main:
            self._norm = norm.detach() if norm.requires_grad else norm

    def finish(self) -> None:
        """Writes what is left, and ends; a second call, or one in a forked process, does nothing."""
        if self._over.is_set() or os.getpid() != self._pid:
            return
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._tick()
        self._writer.close()

    def _may_log(self, name: str) -> bool:
        if name in self._names:
            return True
        if len(self._names) >= _MOST_NAMES:
            warn_once(
                "watch", f"more than {_MOST_NAMES} names are logged: the journal of the run keeps the first of them."
            )
            return False
        self._names.add(name)
        return True

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic() + _PERIOD_S
        while True:
            # To wait for the event instead would let `finish` return up to 50 ms earlier, and costs twice as much: waking up
            # is what this thread's time goes into, and not what it does then.
            time.sleep(_PERIOD_S / _LOOKS)
            if self._over.is_set():
                return
            self._look()
            if time.monotonic() < due:
                continue
            # After the process was stopped for a while, one tick tells of all of it.
            due = max(due, time.monotonic() - _PERIOD_S) + _PERIOD_S
            self._tick()

    def _look(self) -> None:
        """Under a plan that divides the model all ranks take as long in each phase: what differs is who waits in it."""
        phase = self._phases.now
        self._looks[phase] += 1
        self._waiting_looks[phase] += waits_for_ranks(sys._current_frames().get(self._trains))

    def _tick(self) -> None:
        with self._tick_lock:
            progress = self._progress()
            lines: list[tuple[Record, float | None]] = [*self._values(progress)]
            lines.append((self._tick_of(progress), None))
            self._write(lines)

    def _write(self, lines: list[tuple[Record, float | None]]) -> None:
        """Writes lines. A disk that is full must not end the training: it is said once, and tried again."""
        try:
            self._writer.write(lines)
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.warning("could not write %s: %s; lines of the journal are lost", self._writer.path, error)
            self._failing = True

    def _tick_of(self, progress: Progress) -> Tick:
        ns, phase, phase_ns = self._phases.times()
        ms: dict[str, float] = {}
        for name, total in ns.items():
            if total > self._written_ns[name]:
                ms[name] = round((total - self._written_ns[name]) / 1e6, 2)
        waits: dict[str, float] = {}
        for name, count in self._waiting_looks.items():
            if count and name in ms:
                waits[name] = round(ms[name] * count / self._looks[name], 2)
        self._looks = dict.fromkeys(NAMES, 0)
        self._waiting_looks = dict.fromkeys(NAMES, 0)
        steps = self._phases.steps
        steps_of_tick = steps - self._written_steps
        self._written_ns, self._written_steps = ns, steps
        phase_s = phase_ns / 1e9
        memory, peak = self._memory()
        return Tick(
            progress.step, progress.total, progress.samples, progress.tokens, phase, round(phase_s, 3), ms, steps_of_tick,
            memory, peak, self._line() if phase_s > _WAITS_S else "", waits,
        )  # fmt: skip

    def _values(self, progress: Progress) -> list[tuple[Record, float | None]]:
        """What was logged since the last tick, and what is known of the gradients, each with its moment."""
        if not self._main:
            return []
        with self._lock:
            pending, self._pending = self._pending, []
        lines: list[tuple[Record, float | None]] = []
        for t, step, values in pending:
            lines.append((Values(step, {name: float(value) for name, value in values.items()}), t))
        numbers: dict[str, float] = {}
        norm, self._norm = self._norm, None
        if norm is not None:
            numbers["grad_norm"] = float(norm)
            if progress.loss_scale is not None:
                numbers["loss_scale"] = progress.loss_scale
            if progress.skipped_steps is not None:
                numbers["skipped_steps"] = float(progress.skipped_steps)
        elif progress.loss_scale is not None and self._phases.steps > self._written_steps:
            numbers = {"loss_scale": progress.loss_scale, "skipped_steps": float(progress.skipped_steps or 0)}
        if numbers:
            lines.append((Values(progress.step, numbers), None))
        return lines

    def _line(self) -> str:
        """File and line of the script at which the training thread is."""
        frame = sys._current_frames().get(self._trains)
        innermost = frame
        while frame is not None and _is_of_library(frame):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return ""
        return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line_of(frame)}"


def _is_of_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((*_LIBRARIES, _PACELINE, "<"))


def _number_of(value: object) -> Value | None:
    """A number as it is to be read later; None for what is none.

    A tensor on an accelerator is copied there, in the order of the work that was queued: to read it here would wait.
    """
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        return value.detach().reshape(()).clone()
    convert = getattr(value, "__float__", None)  # NumPy's numbers, and those of other libraries
    return None if convert is None or isinstance(value, str) else float(value)  # type: ignore[arg-type]
