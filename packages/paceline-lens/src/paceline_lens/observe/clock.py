"""Clocks: moments that are taken now and compared later, so that measuring a device does not wait for it."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

# A number of `HostClock`, an event of `DeviceClock`; each clock gets its own ones back.
Moment = Any


class Clock(Protocol):
    """Takes moments."""

    def now(self) -> Moment:
        """Takes a moment."""

    def ms(self, begin: Moment, end: Moment) -> float:
        """Returns the milliseconds between two moments that the device has got to."""

    def come(self, moment: Moment) -> bool:
        """Returns whether the device has got to a moment."""

    def wait(self, moment: Moment) -> None:
        """Waits until the device has got to a moment."""

    def back(self, moment: Moment) -> None:
        """Frees a moment that is not needed any more."""


class HostClock:
    """For a CPU, which has done what was asked of it when the call returns."""

    def now(self) -> float:
        """Returns the time in seconds."""
        return time.perf_counter()

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def come(self, moment: float) -> bool:
        return True

    def wait(self, moment: float) -> None:
        """Returns at once."""

    def back(self, moment: float) -> None:
        """Does nothing: a number need not be kept."""


class DeviceClock:
    """For an accelerator: events on its current stream, kept and used again."""

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._free: list[torch.Event] = []

    def now(self) -> torch.Event:
        """An event after what has been queued so far."""
        event = self._free.pop() if self._free else torch.Event(self._kind, enable_timing=True)
        event.record()
        return event

    def ms(self, begin: torch.Event, end: torch.Event) -> float:
        """Returns the device's time between two events, in milliseconds."""
        return float(begin.elapsed_time(end))

    def come(self, moment: torch.Event) -> bool:
        """Returns whether the event has passed."""
        return bool(moment.query())

    def wait(self, moment: torch.Event) -> None:
        """Waits for the event."""
        moment.synchronize()

    def back(self, moment: torch.Event) -> None:
        """Keeps the event, to use it for another moment."""
        self._free.append(moment)


def clock_of(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
