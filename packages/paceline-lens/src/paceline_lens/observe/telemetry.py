"""`Telemetry` writes the state of one rank into the journal of a watched run, once a second. `run/watching.py` starts it.

    training thread   `Phases` reads the clock and adds two integers at each change of phase
    own thread        20 times a second: looks whether the training thread waits for other ranks
                      once a second: writes a `Tick` with the times since the last one; on the main rank also logged values

Times are those of the host. An accelerator works asynchronously, so that its time shows in the phase in which the host waits
for it. Nothing here waits for the device: a logged value on it is copied there at once, and read by the thread up to a second
later.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import SupportsFloat

import torch

from paceline.base.log import warn_once
from paceline.base.ours import our_folders
from paceline.world.places import line_of
from paceline_lens.hangs.threads import frame_of_thread, waits_for_ranks
from paceline_lens.observe.phases import NAMES, Phases
from paceline_lens.watch.journal import JournalWriter
from paceline_lens.watch.records import JournalRecord, Tick, ValuesLogged

_log = logging.getLogger("paceline.observe")
_PERIOD_S = 1.0
_LOOKS = 20  # looks at the training thread in a period
_WAITS_S = 5.0  # of a phase that lasts longer, the tick also says where in the script it is
_LINES_A_SECOND = 20
_MOST_NAMES = 1000
_JOIN_S = 5.0
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

Value = float | torch.Tensor


@dataclass(frozen=True)
class StepProgress:
    """How far a run has come; None for what is not known.

    Attributes:
        step: optimizer steps that have ended, those before a resume included.
        total: steps of the whole run.
        samples, tokens: the samples and tokens that all ranks together have read.
        loss_scale, skipped_steps: the state of the loss scaler.
    """

    step: int = 0
    total: int | None = None
    samples: int | None = None
    tokens: int | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None


class Telemetry:
    """Records what this rank does. It must be constructed on the training thread.

    Args:
        writer: writes this rank's file of the journal.
        phases: the phases of the run.
        progress: returns how far the run has come.
        memory: returns the bytes in use now, and at the peak.
        main: whether this rank also writes logged values.

    Ranks: each has its own; nothing here communicates.
    """

    def __init__(
        self,
        writer: JournalWriter,
        phases: Phases,
        progress: Callable[[], StepProgress],
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
        self._training_thread = threading.get_ident()
        self._written_ns, _, _ = phases.times()
        self._written_steps = phases.steps
        self._pending: list[tuple[float, int, dict[str, Value]]] = []
        self._names: set[str] = set()
        self._norm: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._tick_lock = threading.Lock()
        # Looks at the training thread since the last tick, by phase; and those at which it waited for other ranks.
        self._looks = dict.fromkeys(NAMES, 0)
        self._waiting_looks = dict.fromkeys(NAMES, 0)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._failing = False

    # -- called by the training thread -----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="paceline-telemetry", daemon=True)
        self._thread.start()

    def record(self, record: JournalRecord) -> None:
        """Writes a record at once."""
        self._write([(record, None)])

    def log(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Takes logged values, and leaves out what is not a number.

        Of more than 20 calls in a second, only the last value of each name is written. Of more than 1,000 names, only the
        first ones are.
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
        # A script may give a number of NumPy or a tensor, which JSON does not take.
        step = self._progress().step if step is None else int(step)
        with self._lock:
            if len(self._pending) < _LINES_A_SECOND:
                self._pending.append((time.time(), step, numbers))
            else:
                _, _, merged = self._pending[-1]
                self._pending[-1] = (time.time(), step, {**merged, **numbers})

    def clipped(self, norm: torch.Tensor) -> None:
        """Takes the norm that the gradients had before they were clipped."""
        if self._main:
            self._norm = norm.detach() if norm.requires_grad else norm

    def finish(self) -> None:
        """Writes what is left, and ends the thread. A second call, or a call in a forked process, does nothing."""
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
            # `_over.wait` would let `finish` return up to 50 ms earlier, but a wake-up from it costs twice as much as one from
            # a sleep, and wake-ups are most of what this thread costs.
            time.sleep(_PERIOD_S / _LOOKS)
            if self._over.is_set():
                return
            self._look()
            if time.monotonic() < due:
                continue
            # If the process was stopped for a while, a single tick covers that time, and not one for each second.
            due = max(due, time.monotonic() - _PERIOD_S) + _PERIOD_S
            self._tick()

    def _look(self) -> None:
        """Notes whether the training thread waits for other ranks.

        Under a plan that divides the model, a slow rank makes all ranks spend the same time in each phase. Only the share of
        waiting tells which rank is slow.
        """
        phase = self._phases.now
        self._looks[phase] += 1
        with frame_of_thread(self._training_thread) as frame:
            self._waiting_looks[phase] += waits_for_ranks(frame)

    def _tick(self) -> None:
        with self._tick_lock:
            progress = self._progress()
            lines = self._values(progress)
            lines.append((self._tick_of(progress), None))
            self._write(lines)

    def _write(self, lines: list[tuple[JournalRecord, float | None]]) -> None:
        """Writes lines. A full disk must not end the training: it is logged once, and later lines are tried again."""
        try:
            self._writer.write(lines)
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.warning("could not write %s: %s; lines of the journal are lost", self._writer.path, error)
            self._failing = True

    def _tick_of(self, progress: StepProgress) -> Tick:
        """Returns what has happened since the last tick, and begins the next one."""
        ns, phase, phase_ns = self._phases.times()
        ms: dict[str, float] = {}
        for name, total in ns.items():
            if total > self._written_ns[name]:
                ms[name] = round((total - self._written_ns[name]) / 1e6, 2)
        waits: dict[str, float] = {}
        for name, waiting_looks in self._waiting_looks.items():
            if waiting_looks and name in ms:
                waits[name] = round(ms[name] * waiting_looks / self._looks[name], 2)
        self._looks = dict.fromkeys(NAMES, 0)
        self._waiting_looks = dict.fromkeys(NAMES, 0)
        steps = self._phases.steps
        steps_of_tick = steps - self._written_steps
        self._written_ns = ns
        self._written_steps = steps
        phase_s = phase_ns / 1e9
        memory, peak = self._memory()
        return Tick(
            step=progress.step,
            total=progress.total,
            samples=progress.samples,
            tokens=progress.tokens,
            phase=phase,
            phase_s=round(phase_s, 3),
            ms=ms,
            steps=steps_of_tick,
            memory=memory,
            memory_peak=peak,
            at=self._line() if phase_s > _WAITS_S else "",
            waits=waits,
        )

    def _values(self, progress: StepProgress) -> list[tuple[JournalRecord, float | None]]:
        """Returns what was logged since the last tick, and the state of gradients, each with its time (None for now)."""
        if not self._main:
            return []
        with self._lock:
            pending, self._pending = self._pending, []
        lines: list[tuple[JournalRecord, float | None]] = []
        for t, step, values in pending:
            as_floats = {name: float(value) for name, value in values.items()}
            lines.append((ValuesLogged(step, as_floats), t))
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
            lines.append((ValuesLogged(progress.step, numbers), None))
        return lines

    def _line(self) -> str:
        """Returns the file and the line of the script at which the training thread is."""
        with frame_of_thread(self._training_thread) as innermost:
            frame = innermost
            while frame is not None and _is_of_library(frame):
                frame = frame.f_back
            frame = frame or innermost
            if frame is None:
                return ""
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line_of(frame)}"


def _is_of_library(frame: FrameType) -> bool:
    """Returns whether a frame runs code of Paceline, of an installed package, or of no file, such as "<string>"."""
    file = frame.f_code.co_filename
    return file.startswith((*_LIBRARIES, *our_folders(), "<"))


def _number_of(value: object) -> Value | None:
    """Returns a number that can be read later; None if the value is not a number.

    A tensor on an accelerator is copied on it, after the work that was queued before: to read it here would wait.
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
    if not isinstance(value, SupportsFloat):
        return None
    # Numbers of NumPy and of other libraries. An array has `__float__` too, and raises if it has several elements.
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
