"""`Memory`: the most that each phase of a step holds, on the device and in this process, beside what the plan predicts.

On an accelerator the allocator's peak is read and begun anew at each change of phase, so `torch.accelerator`'s own peak
counts from the last change while this is on. Of the process it is the resident set, whose peak Linux keeps (VmHWM) and
begins anew on request; elsewhere the peak is the current size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.base.text_table import text_table
from paceline_lens.observe.comms import size
from paceline_lens.observe.phases import NAMES, PhaseListener


@dataclass
class PhaseMemory:
    """Bytes of one phase.

    Attributes:
        device_peak, process_peak: the most in one phase, over all steps.
        device, process: when it ended last.
    """

    device_peak: int = 0
    process_peak: int = 0
    device: int = 0
    process: int = 0

    def ended(self, device: int, device_peak: int, process: int, process_peak: int) -> None:
        """Takes what was held at its end, and at its peak."""
        self.device = device
        self.process = process
        self.device_peak = max(self.device_peak, device_peak)
        self.process_peak = max(self.process_peak, process_peak)


def of_process(name: str) -> int:
    """Bytes that Linux counts for this process under a name such as "VmRSS"; 0 where the system does not count them."""
    return _bytes(_status(), f"{name}:".encode())


def resident() -> tuple[int, int]:
    """Returns the resident set of this process, and its peak since the process began or `begin_peak` was called."""
    status = _status()
    if not status:
        return _largest(), _largest()
    return _bytes(status, b"VmRSS:"), _bytes(status, b"VmHWM:")


def begin_peak() -> None:
    """Begins the peak of the resident set anew, where Linux lets this process do so: /proc may be read-only."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_bytes(b"5")  # as proc(5) describes


def _status() -> bytes:
    try:
        return Path("/proc/self/status").read_bytes()
    except OSError:
        return b""


def _bytes(status: bytes, name: bytes) -> int:
    """A number of kB in `/proc/self/status`; 0 where it is not there."""
    begin = status.find(name)
    if begin < 0:
        return 0
    return int(status[begin + len(name) : status.index(b" kB", begin)]) * 1024


def _largest() -> int:
    import resource

    count = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, other systems count kB.
    return int(count if sys.platform == "darwin" else count * 1024)


@dataclass
class MemoryDevice:
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


class Memory(PhaseListener):
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
        self._device = MemoryDevice(device)
        self._predicted = predicted
        self.phases: dict[str, PhaseMemory] = {}
        self.steps: list[int] = []
        self._phase = "before"
        self._peak = 0
        self.base = resident()[0]
        begin_peak()
        self._device.read()

    # -- what phases tell ----------------------------------------------------------------------------------------

    def to(self, phase: str) -> None:
        device, device_peak = self._device.read()
        process, process_peak = resident()
        begin_peak()
        memory = self.phases.setdefault(self._phase, PhaseMemory())
        memory.ended(device, device_peak, process, process_peak)
        # Where there is an accelerator, its memory is what limits a step.
        peak = device_peak if self._device.counts else process_peak
        self._peak = max(self._peak, peak)
        self._phase = phase

    def ended(self) -> None:
        self.to("rest")
        self.steps.append(self._peak)
        self._peak = 0

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def peak(self) -> int:
        """The most bytes so far: of the device where there is one, else of the process above `base`."""
        highest = max([*self.steps, self._peak])
        if self._device.counts:
            return highest
        return max(0, highest - self.base)

    def to_dict(self) -> dict[str, object]:
        """All of it as plain values, in bytes."""
        return {
            "peak": self.peak,
            "base": self.base,
            "steps": self.steps,
            "phases": {name: vars(memory) for name, memory in self.phases.items()},
            "predicted": self._predicted(),
        }

    def text(self) -> str:
        """Returns a table of the phases, and what the plan predicts."""
        rows = [["phase", "peak of the process", "after it", "peak of the device", "after it"]]
        for name in ("before", *NAMES):
            if name in self.phases:
                memory = self.phases[name]
                counts = (memory.process_peak, memory.process, memory.device_peak, memory.device)
                rows.append([name, *map(size, counts)])
        if self._device.counts:
            counted = "of the device"
        else:
            # The CPU has no counts of its own; those of the process include what it had before the run.
            rows = [row[:3] for row in rows]
            counted = f"of the process above the {size(self.base)} that it began with"
        predicted = self._predicted()
        listed = [f"{name} {size(count)}" for name, count in predicted.items() if count]
        parts = ", ".join(listed) or "nothing"
        lines = ["memory of this rank", *text_table(rows, numbers=True)]
        lines.append(f"the most in one step: {size(self.peak)} {counted}")
        lines.append(f"the plan predicts {size(sum(predicted.values()))} without activations: {parts}")
        return "\n".join(lines)
