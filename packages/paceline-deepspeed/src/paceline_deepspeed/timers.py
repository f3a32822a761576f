"""Timers in DeepSpeed's words: of a script's own sections, and of recomputed functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline.world.tree import tensors


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that prints the time of each call: of the forward pass at once, of the backward pass at its end.

    On an accelerator it is the time until what was queued has been done.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        forward_start = _now_s()
        output = function(*args, **kwargs)
        print(f"time (ms) | fwd: {(_now_s() - forward_start) * 1e3:.2f}", flush=True)
        # The backward pass reaches an output first, and an input last.
        backward_starts: list[float] = []
        output_tensor = _first_with_gradient(output)
        input_tensor = _first_with_gradient((args, kwargs))

        def note_start(_: torch.Tensor) -> None:
            backward_starts.append(_now_s())

        def print_backward(_: torch.Tensor) -> None:
            if backward_starts:
                print(f"time (ms) | backward: {(_now_s() - backward_starts.pop()) * 1e3:.2f}", flush=True)

        if output_tensor is not None:
            output_tensor.register_hook(note_start)
        if input_tensor is not None:
            input_tensor.register_hook(print_backward)
        return output

    return call


def _first_with_gradient(values: object) -> torch.Tensor | None:
    """Finds the first tensor in some values that a backward pass reaches."""
    return next((tensor for tensor in tensors(values) if tensor.requires_grad), None)


def _now_s() -> float:
    """Returns the time in seconds, after the accelerator has done what was queued."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Timers by name: `timers("load").start()`, `.stop()`, `.elapsed()` in milliseconds."""

    class Timer:
        """One timer."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self._lap_start = 0.0
            self._laps: list[float] = []  # milliseconds

        def start(self) -> None:
            self.started_ = True
            self._lap_start = _now_s()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            lap = (_now_s() - self._lap_start) * 1e3
            if reset:
                self._laps = []
            self._laps.append(lap)
            self.started_ = False

        def reset(self) -> None:
            self._laps = []
            self.started_ = False

        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds of all laps together; one that is being timed goes on."""
            is_timing = self.started_
            if is_timing:
                self.stop()
            total = sum(self._laps)
            if reset:
                self.reset()
            if is_timing:
                self.start()
            return total

        def mean(self) -> float:
            return sum(self._laps) / len(self._laps) if self._laps else 0.0

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> SynchronizedWallClockTimer.Timer:
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, SynchronizedWallClockTimer.Timer]:
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Prints the times of the timers with these names."""
        cells = []
        for name in names:
            if name in self.timers:
                cells.append(f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}")
        print("time (ms) | " + " | ".join(cells), flush=True)


class StepTimer:
    """An engine's `tput_timer`: how many samples a second its steps train.

    Args:
        batch_size: samples of one optimizer step, over all ranks.

    Attributes:
        epoch_count: how often the script has called `update_epoch_count`.
        global_step_count: optimizer steps so far.
    """

    _WARM_UP_STEPS = 2  # their time is left out, as memory is allocated and kernels are chosen in them

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.epoch_count = 0
        self.global_step_count = 0
        self._start_s = 0.0

    def update_epoch_count(self) -> None:
        """Counts an epoch."""
        self.epoch_count += 1

    def count_step(self) -> None:
        """Counts an optimizer step."""
        self.global_step_count += 1
        if self.global_step_count == self._WARM_UP_STEPS:
            self._start_s = time.perf_counter()

    def avg_samples_per_sec(self) -> float:
        """Returns samples a second since the second step; -1 before it. Nothing waits for an accelerator."""
        timed_steps = self.global_step_count - self._WARM_UP_STEPS
        if timed_steps <= 0:
            return -1.0
        return self.batch_size * timed_steps / (time.perf_counter() - self._start_s)
