"""`Memory`: the most that each phase of a step holds, on the device and in this process, beside what the plan predicts.

On an accelerator the allocator's peak is read and begun anew at each change of phase, so `torch.accelerator`'s own peak
counts from the last change while this is on. Of the process it is the resident set, whose peak Linux keeps (VmHWM) and
begins anew on request; elsewhere the peak is the current size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from paceline.observe.comms import size, table
from paceline.observe.phases import NAMES


@dataclass
class Held:
    """Bytes.

    Attributes:
        device_peak, process_peak: the most in one phase, over all steps.
        device, process: when it ended last.
    """

    device_peak: int = 0
    process_peak: int = 0
    device: int = 0
    process: int = 0


class Resident:
    """The resident set of this process. Its files stay open: opening one costs more than reading it."""

    def __init__(self) -> None:
        self._linux = sys.platform.startswith("linux")
        self._owner = 0  # the process whose files are open: those of a fork are its own
        self._status = self._reset = -1

    def read(self) -> tuple[int, int]:
        """Bytes now, and at the peak since the last call."""
        if not self._linux:
            return _largest(), _largest()
        if self._owner != os.getpid():
            self._open()
        told = os.pread(self._status, 4096, 0)
        if self._reset >= 0:
            os.pwrite(self._reset, b"5", 0)
        return _bytes(told, b"VmRSS:"), _bytes(told, b"VmHWM:")

    def _open(self) -> None:
        self._close()
        self._owner = os.getpid()
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:  # where /proc is read-only the peak is that of the whole process so far
            self._reset = -1

    def _close(self) -> None:
        for file in (self._status, self._reset):
            if file >= 0:
                os.close(file)
        self._status = self._reset = -1

    def __del__(self) -> None:
        self._close()


def _bytes(told: bytes, name: bytes) -> int:
    """A number of kB in `/proc/self/status`; 0 where it is not told."""
    begin = told.find(name)
    return 0 if begin < 0 else int(told[begin + len(name) : told.index(b" kB", begin)]) * 1024


def _largest() -> int:
    import resource

    count = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(count if sys.platform == "darwin" else count * 1024)


@dataclass
class Device:
    """The allocator of an accelerator; a CPU has none."""

    device: torch.device
    counts: bool = field(init=False)

    def __post_init__(self) -> None:
        self.counts = self.device.type != "cpu"

    def read(self) -> tuple[int, int]:
        """Bytes now, and at the peak since the last call."""
        if not self.counts:
            return 0, 0
        now = torch.accelerator.memory_allocated(self.device)
        peak = torch.accelerator.max_memory_allocated(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        return now, peak


class Memory:
    """Follows what is held, phase by phase.

    Args:
        device: of this rank.
        predicted: bytes that the plan predicts for this rank, by what they hold; asked when somebody reads.

    Attributes:
        phases: the most of each phase.
        steps: peak of each step so far: of the device where there is one, else of the process.
        base: bytes that the process held when this began.
    """

    def __init__(self, device: torch.device, predicted: Callable[[], Mapping[str, int]] = dict) -> None:
        self._device, self._resident, self._predicted = Device(device), Resident(), predicted
        self.phases: dict[str, Held] = {}
        self.steps: list[int] = []
        self._phase, self._peak = "before", 0
        self.base = self._resident.read()[0]
        self._device.read()

    # -- what phases tell ----------------------------------------------------------------------------------------

    def to(self, phase: str) -> None:
        """See `observe.phases.Listener`."""
        (device, device_peak), (process, process_peak) = self._device.read(), self._resident.read()
        held = self.phases.setdefault(self._phase, Held())
        held.device, held.process = device, process
        held.device_peak = max(held.device_peak, device_peak)
        held.process_peak = max(held.process_peak, process_peak)
        self._peak = max(self._peak, device_peak if self._device.counts else process_peak)
        self._phase = phase

    def micro_batch(self) -> None:
        """See `observe.phases.Listener`."""

    def stepped(self) -> None:
        """See `observe.phases.Listener`."""

    def ended(self) -> None:
        """See `observe.phases.Listener`."""
        self.to("rest")
        self.steps.append(self._peak)
        self._peak = 0

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def peak(self) -> int:
        """The most bytes so far: of the device where there is one, else of the process above `base`."""
        steps = [*self.steps, self._peak]
        return max(steps) if self._device.counts else max(0, max(steps) - self.base)

    def to_dict(self) -> dict[str, object]:
        """All of it as plain values, in bytes."""
        phases = {name: vars(held) for name, held in self.phases.items()}
        return {
            "peak": self.peak,
            "base": self.base,
            "steps": self.steps,
            "phases": phases,
            "predicted": self._predicted(),
        }

    def text(self) -> str:
        """The table."""
        own = "device" if self._device.counts else "process"
        rows = [["phase", "peak of the process", "after it"]]
        rows[0] += ["peak of the device", "after it"] * self._device.counts
        for name in ("before", *NAMES):
            if name in self.phases:
                held = self.phases[name]
                cells = [size(held.process_peak), size(held.process)]
                rows.append([name, *cells, *([size(held.device_peak), size(held.device)] * self._device.counts)])
        foretold = {name: count for name, count in self._predicted().items() if count}
        said = ", ".join(f"{name} {size(count)}" for name, count in foretold.items()) or "nothing"
        lines = ["memory of this rank", *table(rows)]
        above = "" if self._device.counts else f" above the {size(self.base)} that it began with"
        lines.append(f"the most in one step: {size(self.peak)} of the {own}{above}")
        lines.append(f"the plan predicts {size(sum(foretold.values()))} without activations: {said}")
        return "\n".join(lines)
